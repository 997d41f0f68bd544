"""Blocks of one kind in RAM: one mapping, cut into blocks of one size."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress

from cache.free_list import FreeList
from cache.page_lock import lock_pages
from storage.base import BlockKind

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
        self.block_size = block_size
        # Private: a shared anonymous mapping counts as a file in shared memory and gets no huge pages.
        self._memory = mmap.mmap(-1, capacity * block_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages refuses the advice
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        with suppress(OSError):  # Linux before 5.14 and other systems
            self._memory.madvise(_MADV_POPULATE_WRITE)
        if locked:
            lock_pages(self._memory)
        whole = memoryview(self._memory)
        super().__init__([whole[i * block_size : (i + 1) * block_size] for i in range(capacity)])
        whole.release()

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
