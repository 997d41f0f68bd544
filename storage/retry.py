"""Reads that the operating system refuses: the errors that they raise, and the retries before that."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

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
