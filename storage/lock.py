"""Who may use a store: readers share it, a converter has it alone.

The lock is the kernel's own (flock) on the store's directory: it leaves no file behind, works on read-only
media, and is gone when its process is, however it died.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import TracebackType

from storage.errors import ReadFailed, StoreBusy, UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("edgemoe")


class StoreLock:
    """A lock on a store, held from construction to close(), also across threads. Never waits.

    Args:
        directory: the store's; it must exist.
        exclusive: True for a converter, False for a reader.

    Raises:
        StoreBusy: another process, or another StoreLock of this one, holds it in a way that excludes this.
        UserError: there is no such directory, its filesystem has no locks (converters only; readers go on
            with a warning), or the platform has none.
        ReadFailed: the disk refuses to open it.
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
        """Gives the lock back. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> StoreLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
