"""Pages of memory that the operating system has given to this process, from its own list."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

PAGEMAP, _PRESENT = Path("/proc/self/pagemap"), 1 << 63


def present_pages(address: int, nbytes: int) -> int:
    """Pages of some bytes that are in memory."""
    first, end = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    with PAGEMAP.open("rb") as file:
        file.seek(8 * first)
        entries = struct.unpack(f"<{end - first}Q", file.read(8 * (end - first)))
    return sum(bool(entry & _PRESENT) for entry in entries)
