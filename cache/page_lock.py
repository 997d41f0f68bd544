"""Keeping an arena's pages in RAM: swapped out, an expert in memory is slower than one on disk."""

from __future__ import annotations

import ctypes
import mmap


def lock_pages(memory: mmap.mmap) -> bool:
    """Locks a mapping into RAM until it is unmapped.

    Args:
        memory: writable, and looked at by nobody else while this runs.

    Returns:
        whether the operating system agreed; it does not where RLIMIT_MEMLOCK is smaller than the mapping, and
        no harm is done then.
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
        del at  # a buffer that is still looked at could not be unmapped
