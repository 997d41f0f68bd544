"""I/O past the page cache: edgemoe caches experts itself, and a conversion needs every byte only once.

The mode is set on an open descriptor, so that it can be undone on the same file where the file system refuses it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from edgemoe.storage.base import BLOCK

try:
    import fcntl
except ImportError:  # Windows, which storage.files.lock refuses
    fcntl = None  # type: ignore[assignment]


if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """Allocates uint8 [size], not initialised, at a multiple of BLOCK, as O_DIRECT requires."""
    import numpy as np  # a tenth of a second, which a command that lists stores does not need

    whole = np.empty(size + BLOCK, np.uint8)
    start = -whole.ctypes.data % BLOCK
    return whole[start : start + size]


def bypass_cache(fd: int) -> bool:
    """Makes reads and writes go past the page cache: O_DIRECT on Linux, F_NOCACHE on macOS.

    Returns:
        Whether the file system agreed. It may still refuse the first read or write, with EINVAL.
    """
    try:
        if hasattr(os, "O_DIRECT"):
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        elif hasattr(fcntl, "F_NOCACHE"):
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        else:
            return False
    except OSError:
        return False
    return True


def use_cache(fd: int) -> None:
    """Undoes bypass_cache on the same open file."""
    if hasattr(os, "O_DIRECT"):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    elif hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 0)


def forget(fd: int, offset: int, length: int) -> None:
    """Drops a range of a file from the page cache, where the platform supports it."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
