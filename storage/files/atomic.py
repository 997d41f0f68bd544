"""Atomic writes: after a kill or a power cut at any moment, a file is complete or absent."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgemoe.errors import DoesNotFit, WriteFailed
from edgemoe.storage.files.unbuffered import use_cache
from edgemoe.storage.sizes import format_least, format_size

PARTIAL = ".partial"
"""Suffix of a file that is being written."""


@contextmanager
def partial_file(path: Path, size: int) -> Iterator[Path]:
    """Yields the path of a new file, which replaces `path` when the block ends without an error.

    The block writes, syncs and closes the new file. The directory is synced before this returns. After an error the
    new file is removed and `path` is unchanged.

    Args:
        path: the path of the file; its directory exists.
        size: bytes to be written, which must be free.

    Raises:
        DoesNotFit: the disk has fewer than `size` bytes free, fills up, or allows no file of this size.
        WriteFailed: the operating system refused any other call, here or inside the block.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.unlink(missing_ok=True)
        require_free(path, size)
        yield partial
        partial.replace(path)
        sync_directory(path.parent)
    except BaseException as error:
        with suppress(OSError):  # the first error is the one to report
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise refused(path, size, error) from error
        raise


@contextmanager
def replacing(path: Path, size: int) -> Iterator[int]:
    """Yields a descriptor of a partial_file, synced and closed at the end. Arguments and errors are its own."""
    with partial_file(path, size) as partial:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            yield fd
            os.fsync(fd)
        finally:
            os.close(fd)


def require_free(path: Path, size: int) -> None:
    """Raises DoesNotFit if fewer than `size` bytes are free on the disk of `path`'s directory."""
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise _disk_full(path, size, f"{format_size(free)} free")


def write_all(fd: int, data: memoryview | bytes) -> None:
    """Writes all of `data`, contiguous bytes, with as many calls as the operating system needs.

    After the first write that O_DIRECT refuses, the descriptor writes through the page cache.
    """
    view = memoryview(data)
    direct = True
    while view:
        try:
            view = view[os.write(fd, view) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not direct:
                raise
            use_cache(fd)
            direct = False


def sync_directory(directory: Path) -> None:
    """Syncs the names in a directory to disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def refused(path: Path, size: int, error: OSError) -> DoesNotFit | WriteFailed:
    """Converts an OSError from writing the `size` bytes of `path` into an error of the tree."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(path, size, f"a disk that filled up while writing ({error.strerror})")
    if error.errno == errno.EFBIG:
        return _disk_full(
            path, size, f"a disk or a process limit that allows no file of this size ({error.strerror})"
        )
    return WriteFailed(
        f"to write {format_size(size)} to {path}",
        str(error.strerror),
        "check the disk, then run the command again to resume",
    )


def _disk_full(path: Path, size: int, finding: str) -> DoesNotFit:
    return DoesNotFit(
        f"{format_least(size)} free on disk for {path}",
        finding,
        "free some space there and run the command again to resume, or choose another disk",
        minimum=size,
    )
