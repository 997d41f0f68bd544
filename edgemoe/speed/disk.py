"""Measures a disk with edgemoe's own access pattern: 1 MiB reads in random order, bypassing the page cache."""

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

from edgemoe.storage.files.atomic import require_free, write_all
from edgemoe.storage.files.unbuffered import bypass_cache, forget, use_cache

PIECE = 1 << 20
"""Bytes of a read: about the size of an expert's plane."""

_THREADS = 4


@dataclass(frozen=True)
class DiskSpeed:
    """A measurement, in bytes per second.

    Args:
        write: sequential, synced at the end.
        read: pieces of PIECE bytes in random order, by several threads.
        direct: whether the reads bypassed the page cache (O_DIRECT, or the platform's equivalent).
    """

    write: float
    read: float
    direct: bool


def measure_disk(directory: Path, size: int) -> DiskSpeed:
    """Writes an unnamed file of `size` bytes and reads it back.

    Args:
        directory: a directory on the disk that is measured; it must exist and be writable.
        size: bytes, a multiple of PIECE.

    Raises:
        DoesNotFit: the disk has too little free space for the file.
        OSError: the disk cannot be written.
    """
    require_free(directory / "probe", size)
    with tempfile.TemporaryFile(dir=directory) as file:
        fd, piece = file.fileno(), os.urandom(PIECE)  # incompressible
        start = time.perf_counter()
        for _ in range(size // PIECE):
            write_all(fd, piece)
        os.fsync(fd)
        written = time.perf_counter() - start
        forget(fd, 0, size)
        direct = _reads_directly(fd)
        offsets = random.Random(0).sample(range(0, size, PIECE), size // PIECE)
        start = time.perf_counter()
        with ThreadPoolExecutor(_THREADS) as pool:
            read = sum(pool.map(lambda i: _read(fd, offsets[i::_THREADS]), range(_THREADS)))
        return DiskSpeed(size / written, read / (time.perf_counter() - start), direct)


def _reads_directly(fd: int) -> bool:
    """Switches a file to reads that bypass the page cache. False: the file system refuses, and the cache is used."""
    if not bypass_cache(fd):
        return False
    try:
        _read(fd, [0])
    except OSError:
        use_cache(fd)
        return False
    return True


def _read(fd: int, offsets: Sequence[int]) -> int:
    buffer = memoryview(mmap.mmap(-1, PIECE))
    return sum(os.preadv(fd, [buffer], offset) for offset in offsets)
