"""The lock of a store: any number of readers, or one converter.

The lock is flock on the store's directory: it leaves no file, works on read-only media, and ends with its process.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from pathlib import Path

from storage.errors import ReadFailed, StoreBusy, UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("edgemoe")


class StoreLock(AbstractContextManager["StoreLock"]):
    """A lock on a store, from construction to close(), for all threads of the process. Never waits.

    Args:
        directory: the store's; it must exist.
        exclusive: True for a converter, False for a reader.

    Raises:
        StoreBusy: an existing lock, of this or another process, excludes this one.
        UserError: the directory does not exist, its file system has no locks (a reader only logs a warning), or the
            platform has none.
        ReadFailed: the operating system refuses to open the directory.
    """

    def __init__(self, directory: Path, *, exclusive: bool) -> None:
        self._fd = -1
        wanted = f"{directory} free for {'writing' if exclusive else 'reading'}"
        if fcntl is None:
            raise UserError(wanted, "a platform without flock", "use Linux or macOS; WSL 2 works on Windows")
        try:
            self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise UserError(wanted, str(error.strerror), "give the path of a store") from error
        except OSError as error:
            raise ReadFailed(wanted, str(error.strerror), "check the disk, then try again") from error
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            found = (
                "another process that reads or writes it" if exclusive else "another process that writes it"
            )
            raise StoreBusy(wanted, found, "wait until that process ends, or stop it") from error
        except OSError as error:
            self.close()
            if exclusive:
                raise UserError(
                    wanted, f"a file system without locks ({error.strerror})", "convert to a local disk"
                ) from error
            _log.warning(
                "%s cannot be locked (%s): do not convert to it while it is read", directory, error.strerror
            )

    def close(self) -> None:
        """Releases the lock. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __exit__(self, *error: object) -> None:
        self.close()
