"""Opening of files, and reads that the operating system refuses: their retries, and their errors after that."""

from __future__ import annotations

import errno
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING

from edgemoe.errors import MissingTensor, ReadFailed

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

PATIENCE = 5.0
"""Seconds of wall time, from the first failure on, in which a read that makes no progress is tried again."""

FIRST_PAUSE = 0.01
"""Seconds before the first retry; every further pause is twice as long."""

LONGEST_PAUSE = 0.5
"""Seconds between two attempts, at most."""

REPORT_EVERY = 60.0
"""Seconds between two warnings about survived failures."""

_PIECE = 1 << 18
"""Bytes of memory that `RegularFile.read` takes at a time."""

TRANSIENT = (
    *(errno.EIO, errno.EINTR, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT),
    errno.ENOLINK,  # Linux: a recoverable error of the path to the disk
)
"""Error numbers of reads that are tried again."""

_log = logging.getLogger("edgemoe")


class Retries:
    """The failures of one read since it last made progress. For one thread.

    >>> retries = Retries(Path("experts"))
    >>> retries.failed(OSError(errno.EIO, "Input/output error"))  # after a pause: try again
    >>> retries.failed(OSError(errno.EBADF, "Bad file descriptor"))  # at once: give up
    'Bad file descriptor'

    Args:
        path: the path of the file that is read.

    Attributes:
        count: attempts after failures, in all.
    """

    _warned = -math.inf
    """When the last warning of any read was logged, on the clock."""
    _lock = threading.Lock()

    def __init__(self, path: Path) -> None:
        self.count = 0
        self._path, self._failures, self._since = path, 0, 0.0

    def failed(self, error: OSError) -> str | None:
        """Counts a failed attempt, and waits until the next one.

        Returns:
            None; the failure for an error's message where no attempt follows: at once if the error is permanent,
            with attempts and seconds if PATIENCE has passed or GivingUp is entered.
        """
        now = time.monotonic()
        if not self._failures:
            self._since = now
        self._failures += 1
        if error.errno not in TRANSIENT:
            return str(error.strerror)
        pause = FIRST_PAUSE * 2 ** min(self._failures - 1, 10)
        left = self._since + PATIENCE - now
        if left <= 0 or GivingUp.entered.wait(min(pause, LONGEST_PAUSE, left)):
            return f"{error.strerror}, {self._failures} times in {time.monotonic() - self._since:.1f} s"
        self.count += 1
        return None

    def progress(self) -> None:
        """Forgets the failures: the read goes on. Warns of them, at most every REPORT_EVERY seconds in the process."""
        if not self._failures:
            return
        now, failures = time.monotonic(), self._failures
        self._failures = 0
        with Retries._lock:
            due = now - Retries._warned >= REPORT_EVERY
            Retries._warned = now if due else Retries._warned
        if due:
            _log.warning(
                "%s: a read failed %d times in %.1f s and then succeeded: check the disk and its cable",
                *(self._path, failures, now - self._since),
            )


class GivingUp:
    """A context in which no read of the process is tried again: for a caller that waits for other threads' reads.

    Contexts nest, and overlap in several threads.
    """

    entered = threading.Event()
    _depth = 0
    _lock = threading.Lock()

    def __enter__(self) -> None:
        with GivingUp._lock:
            GivingUp._depth += 1
            GivingUp.entered.set()

    def __exit__(self, *error: object) -> None:
        with GivingUp._lock:
            GivingUp._depth -= 1
            if not GivingUp._depth:
                GivingUp.entered.clear()


class RegularFile(FileIO):
    """A regular file, open for unbuffered reads; a transient error is retried for PATIENCE."""

    def __init__(self, fd: int, path: Path) -> None:
        super().__init__(fd)
        self._path = path

    def readinto(self, into: WriteableBuffer) -> int:
        """Fills a buffer with the next bytes; returns their number, 0 at the file's end."""
        retries = Retries(self._path)
        while True:
            try:
                got = os.readv(self.fileno(), [into])
            except OSError as error:
                if found := retries.failed(error):
                    raise OSError(error.errno, found, str(self._path)) from error
            else:
                retries.progress()
                return got

    def read(self, size: int | None = -1) -> bytes:
        """Reads `size` bytes, or all to the file's end where it is nearer; by default all."""
        if size is None or size < 0:
            return self.readall()
        # Callers pass the most that they accept, which is often a thousand times as much as a file has.
        pieces, left = list[bytes](), size
        while left:
            piece = bytearray(min(left, _PIECE))
            got = self.readinto(piece)
            if not got:
                break
            pieces.append(bytes(memoryview(piece)[:got]))
            left -= got
        return b"".join(pieces)

    def readall(self) -> bytes:
        """Reads all bytes to the file's end."""
        return RawIOBase.readall(self) or b""  # FileIO's own passes by readinto


@contextmanager
def read_errors(expectation: str, action: str) -> Iterator[None]:
    """Converts an OSError of the block into an error with these parts: MissingTensor or ReadFailed."""
    try:
        yield
    except FileNotFoundError as error:
        raise MissingTensor(expectation, "no such file", action) from error
    except OSError as error:
        raise ReadFailed(expectation, str(error.strerror), action) from error


def open_regular(path: Path) -> RegularFile:
    """Opens a regular file for unbuffered reads. A pipe or a device, where a read may wait for ever, is not opened.

    Raises:
        OSError: the file cannot be opened, or is not a regular one.
    """
    file = RegularFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), path)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "a pipe, device or directory instead of a regular file", str(path))
    return file
