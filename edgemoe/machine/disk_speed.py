"""How fast a disk is written and read as edgemoe reads it: past the page cache, in megabytes, in random order."""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from storage.atomic import require_free, write_all
from storage.unbuffered import bypass_cache, forget, use_cache

PIECE = 1 << 20
"""Bytes of a read: about what a plane of an expert has."""

_THREADS = 4


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes a second.

    Args:
        write: in order, synced at the end.
        read: pieces of PIECE bytes in random order, some at a time.
        direct: whether the reads went past the page cache (O_DIRECT or the platform's like).
    """

    write: float
    read: float
    direct: bool


def measure_disk(directory: Path, size: int) -> DiskSpeed:
    """Writes a file of `size` bytes that has no name, and reads it back.

    Args:
        directory: on the disk in question; it must exist and be writable.
        size: bytes, a multiple of PIECE.

    Raises:
        DoesNotFit: the disk has no room for the file.
        OSError: the disk cannot be written.
    """
    require_free(directory / "probe", size)
    with tempfile.TemporaryFile(dir=directory) as file:
        fd, piece = file.fileno(), os.urandom(PIECE)  # what does not compress
        start = time.perf_counter()
        for _ in range(size // PIECE):
            write_all(fd, piece)
        os.fsync(fd)
        written = time.perf_counter() - start
        forget(fd, 0, size)
        direct = bypass_cache(fd)
        if direct:
            try:
                os.preadv(fd, [memoryview(mmap.mmap(-1, PIECE))], 0)
            except OSError:
                use_cache(fd)
                direct = False
        offsets = random.Random(0).sample(range(0, size, PIECE), size // PIECE)
        start = time.perf_counter()
        with ThreadPoolExecutor(_THREADS) as pool:
            done = sum(pool.map(lambda i: _read(fd, offsets[i::_THREADS]), range(_THREADS)))
        return DiskSpeed(size / written, done / (time.perf_counter() - start), direct)


def _read(fd: int, offsets: Sequence[int]) -> int:
    buffer = memoryview(mmap.mmap(-1, PIECE))
    return sum(os.preadv(fd, [buffer], offset) for offset in offsets)
