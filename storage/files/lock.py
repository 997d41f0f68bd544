"""The lock of a store: any number of readers, or one converter.

The lock is flock on the store's directory: it leaves no file, works on read-only media, and ends with its process. On
Linux /proc/locks names the process.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from edgemoe.errors import ReadFailed, StoreBusy, UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("edgemoe")


def writer_of(directory: Path) -> int | None:
    """The id of the process that has locked a store for writing; None: there is none, or the system does not say."""
    with suppress(OSError):
        found = directory.stat()
        inode = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        # 3: FLOCK  ADVISORY  WRITE 1234 fd:01:5678 0 EOF
        for line in Path("/proc/locks").read_text().splitlines():
            match line.split():
                case [_, "FLOCK", _, "WRITE", pid, place, *_] if place == inode and pid.isdecimal():
                    return int(pid) or None  # 0: a process outside of this container
    return None


class StoreLock(AbstractContextManager["StoreLock"]):
    """A lock on a store, from construction to close(), for all threads of the process. Never waits.

    Args:
        directory: the directory of the store; it must exist.
        exclusive: True for a converter, False for a reader.

    Raises:
        StoreBusy: an existing lock, of this or another process, excludes this one, or the directory is being removed.
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
            pid = writer_of(directory)
            process = f"another process (id {pid})" if pid else "another process"
            found = f"{process} that {'reads or writes' if exclusive and not pid else 'writes'} it"
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
        else:
            if not self._is_at(directory):
                self.close()
                raise StoreBusy(wanted, "another process that has just removed it", "run the command again")

    def _is_at(self, directory: Path) -> bool:
        """Whether the locked directory still has its name: not where it was removed between opening and locking."""
        try:
            return os.path.samestat(os.fstat(self._fd), directory.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Releases the lock. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __exit__(self, *error: object) -> None:
        self.close()
