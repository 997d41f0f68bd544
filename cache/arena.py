"""Memory for one kind of block in RAM: mapped once, cut into pieces of one size."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import suppress

from cache.free_list import FreeList
from cache.page_lock import lock_pages
from storage.base import BLOCK, BlockKind

_MADV_POPULATE_WRITE = 23
"""Linux's advice to fault every page in now; Python has no name for it yet."""


class Arena(FreeList):
    """`capacity` blocks of `block_size` bytes in one anonymous mapping. Not thread-safe: its tier locks.

    Blocks are aligned to 4096 bytes, so O_DIRECT reads straight into them. Where the operating system can,
    it gives all their memory, zeroed, at construction (elsewhere at the first touch), so that no token
    waits for a page fault and a limit that the machine cannot hold shows before the first token.

    Args:
        capacity: blocks, 1 or more.
        block_size: bytes, a positive multiple of 4096.
        locked: ask the operating system never to swap them out.

    Raises:
        ValueError: a capacity or a size that is not so.
        OSError: the address space for it is not to be had.
    """

    def __init__(self, capacity: int, block_size: int, *, locked: bool = True) -> None:
        if capacity < 1 or block_size < 1 or block_size % BLOCK:
            raise ValueError(
                f"{capacity} blocks of {block_size} bytes: want at least 1, of {BLOCK}s of bytes"
            )
        super().__init__(capacity)
        self.block_size = block_size
        # Private: a shared anonymous mapping counts as a file in shared memory and gets no huge pages.
        self._memory = mmap.mmap(-1, capacity * block_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel built without them refuses the advice
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        with suppress(OSError):  # Linux before 5.14 and other systems
            self._memory.madvise(_MADV_POPULATE_WRITE)
        if locked:
            lock_pages(self._memory)
        whole = memoryview(self._memory)
        self._views = [whole[i * block_size : (i + 1) * block_size] for i in range(capacity)]
        whole.release()

    def view(self, index: int) -> memoryview:
        """A block's writable bytes, uint8 [block_size]; always the same object. Valid until close."""
        return self._views[index]

    def close(self) -> None:
        """Unmaps the memory. Idempotent.

        Raises:
            BufferError: somebody still looks at a block; the mapping stays.
        """
        for view in self._views:
            view.release()
        self._memory.close()


def in_ram(counts: Mapping[BlockKind, int]) -> dict[str, FreeList]:
    """Arenas of exactly so many blocks of each kind.

    Raises:
        OSError: the memory is not to be had.
    """
    return {kind.name: Arena(count, kind.size) for kind, count in counts.items()}
