"""Complete reads of a range of a source file, or an error with file and offset."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from edgemoe.errors import TruncatedFile
from edgemoe.storage.base import BLOCK
from edgemoe.storage.files.retry import Retries, open_regular, read_errors
from edgemoe.storage.files.unbuffered import aligned, bypass_cache, use_cache
from edgemoe.storage.record.offsets import align

if TYPE_CHECKING:
    from edgemoe.storage.record.planes import Bytes

DIRECT_FROM = 1 << 20
"""Bytes: a range of this size or more is read past the page cache; smaller ranges gain from kernel read-ahead."""

_ACTION = "check the disk, or download the file again"


def read_range(path: Path, offset: int, size: int) -> Bytes:
    """Reads uint8 [size] from `offset` on. A transient error is retried for PATIENCE.

    The bytes have the alignment in memory that they have in the file, up to BLOCK.

    Args:
        path: the path of the file, which is opened for this read alone.
        offset: bytes from the file's start.
        size: bytes.

    Raises:
        TruncatedFile: the file ends before offset + size.
        MissingTensor: the file does not exist.
        ReadFailed: the operating system refused the read, retries included.
    """
    wanted = f"{size} bytes at {offset} in {path}"
    before = offset % BLOCK
    buffer = aligned(align(before + size))
    with read_errors(wanted, _ACTION), open_regular(path) as file:
        fd = file.fileno()
        direct = size >= DIRECT_FROM and bypass_cache(fd)
        got = _fill(fd, path, offset - before, buffer.data, before + size, direct)
    if got < before + size:
        raise TruncatedFile(wanted, f"{max(got - before, 0)} bytes before the end of the file", _ACTION)
    return buffer[before : before + size]


def _fill(fd: int, path: Path, start: int, into: memoryview, least: int, direct: bool) -> int:
    """Reads at least `least` bytes from `start`, a multiple of BLOCK; returns fewer at the end of the file."""
    done, retries = 0, Retries(path)
    while done < least:
        try:
            got = os.preadv(fd, [into[done:]], start + done)
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                if found := retries.failed(error):
                    raise OSError(error.errno, found) from error
                continue
            got = 0
        else:
            if not got:
                break
            retries.progress()
        done += got
        if direct and done < least:
            # O_DIRECT was refused, or ended inside a block, from where it cannot continue.
            use_cache(fd)
            direct = False
    return done


def read_whole(path: Path) -> bytes:
    """Reads all bytes of a small file.

    Raises:
        TruncatedFile, MissingTensor, ReadFailed: from read_range.
    """
    with read_errors(f"a file {path}", _ACTION):
        size = path.stat().st_size
    return read_range(path, 0, size).tobytes()
