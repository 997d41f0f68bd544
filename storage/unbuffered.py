"""Past the page cache: experts are cached by edgemoe, and what a conversion passes through is needed once.

Set on an open descriptor, not when opening, so that what is refused can be taken back on the same file.
"""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from storage.base import BLOCK

try:
    import fcntl
except ImportError:  # Windows, which storage.lock refuses
    fcntl = None  # type: ignore[assignment]


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """uint8 [size], not initialised, at an address that O_DIRECT takes: a multiple of BLOCK."""
    whole = np.empty(size + BLOCK, np.uint8)
    start = -whole.ctypes.data % BLOCK
    return whole[start : start + size]


def bypass_cache(fd: int) -> bool:
    """Makes reads and writes go past the page cache: O_DIRECT on Linux, F_NOCACHE on macOS.

    Returns:
        whether the filesystem agreed. It may still refuse the first read or write, with EINVAL.
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
    """Takes bypass_cache back, for the same open file."""
    if hasattr(os, "O_DIRECT"):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    elif hasattr(fcntl, "F_NOCACHE"):
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 0)


def forget(fd: int, offset: int, length: int) -> None:
    """Drops bytes of a file from the page cache, where the platform can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)
