"""Locking an arena's pages in RAM: an expert that is swapped out is slower to reach than one on disk."""

from __future__ import annotations

import ctypes
import mmap


def lock_pages(memory: mmap.mmap, start: int = 0, end: int | None = None, *, lock: bool = True) -> bool:
    """Locks the pages of a mapping in RAM until it is unmapped.

    Args:
        memory: writable, not closed while this runs.
        start, end: bytes, from the start of a page on; None: to the end.
        lock: False unlocks them: only then does the operating system take them back.

    Returns:
        whether the operating system has done so. It refuses to lock, without other effect, where RLIMIT_MEMLOCK is
        smaller than the mapping.
    """
    try:
        system = ctypes.CDLL(None, use_errno=True)
        call = system.mlock if lock else system.munlock
    except (OSError, AttributeError):  # Windows
        return False
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    at = (ctypes.c_char * ((len(memory) if end is None else end) - start)).from_buffer(memory, start)
    try:
        return bool(call(ctypes.addressof(at), len(at)) == 0)
    finally:
        del at  # a mapping with an exported buffer cannot be unmapped
