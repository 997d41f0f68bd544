"""Opening of files, and reads that the operating system refuses: their errors, and the retries before that."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from storage.errors import MissingTensor, ReadFailed

RETRIES = 3
"""Consecutive attempts without progress, after the first, before a read fails."""

BACK_OFF = 0.01
"""Seconds before the first retry; every further delay is twice as long."""

TRANSIENT = (errno.EIO, errno.EINTR, errno.EAGAIN)
"""Error numbers of reads that are retried."""


@contextmanager
def read_errors(wanted: str, action: str) -> Iterator[None]:
    """Converts an OSError of the block into an error with these parts: MissingTensor or ReadFailed."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingTensor(wanted, "no such file", action) from error
    except OSError as error:
        raise ReadFailed(wanted, str(error.strerror), action) from error


def open_regular(path: Path) -> FileIO:
    """Opens a regular file for unbuffered reads. A pipe or a device, where a read may wait for ever, is not opened.

    Raises:
        OSError: the file cannot be opened, or is not a regular one.
    """
    file = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "a pipe, device or directory instead of a regular file", str(path))
    return file
