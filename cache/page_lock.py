"""Locking an arena's pages in RAM: an expert that is swapped out is slower to reach than one on disk."""

from __future__ import annotations

import ctypes
import mmap


def lock_pages(memory: mmap.mmap) -> bool:
    """Locks a mapping in RAM until it is unmapped.

    Args:
        memory: writable, without exported buffers while this runs.

    Returns:
        whether the operating system has locked it. It refuses, without other effect, where RLIMIT_MEMLOCK is
        smaller than the mapping.
    """
    try:
        mlock = ctypes.CDLL(None, use_errno=True).mlock
    except (OSError, AttributeError):  # Windows
        return False
    mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    at = (ctypes.c_char * len(memory)).from_buffer(memory)
    try:
        return bool(mlock(ctypes.addressof(at), len(memory)) == 0)
    finally:
        del at  # a mapping with an exported buffer cannot be unmapped
