"""Writes a file in regions: runs of bytes that are each written and hashed in order.

So the matrices of an expert go to their places in several tensors at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import xxhash

from edgemoe.storage.base import BLOCK
from edgemoe.storage.files.atomic import write_all
from edgemoe.storage.files.unbuffered import aligned, bypass_cache, use_cache
from edgemoe.storage.record.offsets import align

if TYPE_CHECKING:
    from edgemoe.storage.record.planes import Bytes

_WINDOW = 4 << 20
"""Bytes of a file, from a multiple on, that are written at once."""


class Sink:
    """Writes the regions of one file past the page cache, each from its start to its end; not thread-safe.

    The blocks at the ends of a region, parts of which may belong to its neighbours, are written by `finish`.

    Args:
        fd: the file descriptor of the file.
        sizes: bytes of every region, in the file's order.
    """

    def __init__(self, fd: int, sizes: Sequence[int]) -> None:
        self._fd, self._sizes = fd, list(sizes)
        self._starts = list(accumulate(self._sizes, initial=0))
        self._done = [0] * len(self._sizes)
        self._digests = [xxhash.xxh3_64() for _ in self._sizes]
        self._windows: dict[int, Bytes] = {}
        self._free: list[Bytes] = []
        self._ends: list[tuple[int, bytes]] = []
        bypass_cache(fd)

    def write(self, region: int, data: memoryview) -> None:
        """Appends bytes to a region.

        Raises:
            ValueError: more bytes than the region has.
            OSError: the operating system refused a write.
        """
        if self._done[region] + data.nbytes > self._sizes[region]:
            raise ValueError(f"expected at most {self._sizes[region]} bytes in region {region}, got more")
        self._digests[region].update(data)
        while data.nbytes:
            if region not in self._windows:
                self._windows[region] = self._free.pop() if self._free else aligned(_WINDOW)
            place = (self._starts[region] + self._done[region]) % _WINDOW
            count = min(data.nbytes, _WINDOW - place)
            self._windows[region].data[place : place + count] = data[:count]
            data = data[count:]
            self._done[region] += count
            if place + count == _WINDOW or self._done[region] == self._sizes[region]:
                self._flush(region)

    def _flush(self, region: int) -> None:
        """Writes the whole blocks of a region's window, and keeps the rest for `finish`."""
        start, window = self._starts[region], self._windows.pop(region)
        end = start + self._done[region]
        origin = (end - 1) // _WINDOW * _WINDOW
        first = max(start, origin)
        low, high = align(first), end // BLOCK * BLOCK
        if low < high:
            os.lseek(self._fd, low, os.SEEK_SET)
            write_all(self._fd, window.data[low - origin : high - origin])
            rest = [(first, low), (high, end)]
        else:
            rest = [(first, end)]
        self._ends += [(a, window.data[a - origin : b - origin].tobytes()) for a, b in rest if a < b]
        self._free.append(window)

    def finish(self) -> list[list[Any]]:
        """Writes the ends of regions. Returns [bytes, checksum of 16 hex digits] of every region.

        Raises:
            ValueError: a region is incomplete.
            OSError: the operating system refused a write.
        """
        if self._done != self._sizes:
            raise ValueError(f"expected regions of {self._sizes} bytes, got {self._done}")
        use_cache(self._fd)
        for offset, data in self._ends:
            os.lseek(self._fd, offset, os.SEEK_SET)
            write_all(self._fd, data)
        pairs = zip(self._sizes, self._digests, strict=True)
        return [[size, digest.hexdigest()] for size, digest in pairs]
