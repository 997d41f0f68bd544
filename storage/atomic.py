"""Files that are there whole or not at all, after a kill or a power cut at any moment."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.errors import DoesNotFit, WriteFailed
from storage.unbuffered import use_cache

PARTIAL = ".partial"
"""What the name of a file still being written ends in."""


@contextmanager
def partial_file(path: Path, size: int) -> Iterator[Path]:
    """Where to write a new file that takes `path`'s place when the block ends without an error.

    The block leaves a file there, synced and closed. The name, too, has reached the disk before this returns. On an
    error the new file is removed and `path` is as it was.

    Args:
        path: its directory must exist.
        size: bytes that will be written; asked of the filesystem first.

    Raises:
        DoesNotFit: the disk has less than `size` bytes free, filled up meanwhile, or takes no file this large.
        WriteFailed: the operating system refused something else, here or inside the block.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.unlink(missing_ok=True)
        require_free(path, size)
        yield partial
        partial.replace(path)
        sync_directory(path.parent)
    except BaseException as error:
        with suppress(OSError):  # the first error is the one to tell
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise refused(path, size, error) from error
        raise


@contextmanager
def replacing(path: Path, size: int) -> Iterator[int]:
    """A descriptor of a partial_file, synced and closed when the block ends. Arguments and errors are the same."""
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
        raise _disk_full(path, size, f"{free} bytes free")


def write_all(fd: int, data: memoryview | bytes) -> None:
    """Writes all of `data`, contiguous bytes, whatever number of calls the operating system takes for it.

    What cannot go past the page cache, of a descriptor that does, goes through it from then on.
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
    """Makes the names in a directory as durable as its files."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def refused(path: Path, size: int, error: OSError) -> DoesNotFit | WriteFailed:
    """The place in the tree of an error met while the `size` bytes of `path` were written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _disk_full(path, size, f"a disk that filled up while writing ({error.strerror})")
    if error.errno == errno.EFBIG:
        return _disk_full(
            path, size, f"a disk or a process limit that allows no file of this size ({error.strerror})"
        )
    return WriteFailed(
        f"to write {size} bytes to {path}",
        str(error.strerror),
        "check the disk, then run the command again; an unfinished conversion resumes",
    )


def _disk_full(path: Path, size: int, found: str) -> DoesNotFit:
    return DoesNotFit(
        f"{size} free bytes on disk for {path}",
        found,
        "free some space there, or choose another disk; an unfinished conversion resumes",
        minimum=size,
    )
