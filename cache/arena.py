"""Blocks of one kind in RAM: one mapping, cut into blocks of one size."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress

from edgemoe.cache.blocks import FreeList
from edgemoe.cache.page_lock import lock_pages
from edgemoe.storage.base import BlockKind

_MADV_POPULATE_WRITE = 23
"""Linux's advice to fault in every page now; Python's mmap module does not define it."""


class Arena(FreeList):
    """`capacity` blocks of `block_size` bytes in one anonymous mapping. Not thread-safe: the tier that owns it locks.

    Blocks are aligned to 4096 bytes, so O_DIRECT reads straight into them. Where the operating system supports it,
    all pages are faulted in at construction, zeroed (elsewhere at the first touch): no token waits for a page
    fault, and a limit above the machine's memory fails before the first token.

    Args:
        capacity: blocks, 1 or more.
        block_size: bytes, a positive multiple of 4096.
        locked: whether the operating system may not swap the blocks out, as far as it permits that.

    Raises:
        OSError: the system refuses so much address space.
    """

    def __init__(self, capacity: int, block_size: int, *, locked: bool = True) -> None:
        self.block_size, self._locked, self._backed = block_size, locked, capacity * block_size
        # Private: a shared anonymous mapping counts as a file in shared memory and gets no huge pages.
        self._memory = mmap.mmap(-1, capacity * block_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise("MADV_HUGEPAGE", 0, len(self._memory))
        self._populate(0, len(self._memory))
        whole = memoryview(self._memory)
        super().__init__([whole[i * block_size : (i + 1) * block_size] for i in range(capacity)])
        whole.release()

    def back(self, nbytes: int) -> None:
        """Faults in the first `nbytes` bytes, and returns the memory of all later bytes to the system.

        Args:
            nbytes: bytes from the start, at most the size of the mapping; no taken block lies after them.
        """
        before, self._backed = self._backed, nbytes
        if nbytes > before:
            # As small pages (from Linux 5.14 on), which the system may join later: it moves others' pages to make huge
            # ones, for half a second where its memory is in pieces, and a token waits.
            start = before // mmap.PAGESIZE * mmap.PAGESIZE
            self._advise("MADV_NOHUGEPAGE", start, nbytes)
            self._populate(start, nbytes)
            self._advise("MADV_HUGEPAGE", start, nbytes)
            return
        start, end = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, len(self._memory)
        if nbytes < before and start < end:
            lock_pages(self._memory, start, end, lock=False)
            # Else the system may make one huge page again of one whose end has gone.
            self._advise("MADV_NOHUGEPAGE", start, end)
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)

    def _populate(self, start: int, end: int) -> None:
        """Faults in all pages of some bytes, from the start of a page on."""
        with suppress(OSError):  # Linux before 5.14 and other systems
            self._memory.madvise(_MADV_POPULATE_WRITE, start, end - start)
        if self._locked:
            lock_pages(self._memory, start, end)

    def _advise(self, advice: str, start: int, end: int) -> None:
        if hasattr(mmap, advice):
            with suppress(OSError):  # a kernel without huge pages refuses the advice
                self._memory.madvise(getattr(mmap, advice), start, end - start)

    def close(self) -> None:
        """Unmaps the memory. Idempotent.

        Raises:
            BufferError: a buffer of a block is still exported; the mapping stays.
        """
        for view in self.views:
            view.release()
        self._memory.close()


def in_ram(counts: Mapping[BlockKind, int]) -> dict[str, FreeList]:
    """Allocates an arena in RAM for each kind, with exactly `counts` blocks: an implementation of Arenas.

    Raises:
        OSError: the system refuses so much memory.
    """
    return {kind.name: Arena(count, kind.size) for kind, count in counts.items()}
