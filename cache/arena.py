"""Memory for one kind of block: mapped once, cut into pieces of one size, handed out in constant time."""

from __future__ import annotations

import mmap
from contextlib import suppress

from cache.page_lock import lock_pages
from storage.base import BLOCK

_MADV_POPULATE_WRITE = 23
"""Linux's advice to fault every page in now; Python has no name for it yet."""


class Arena:
    """`capacity` blocks of `block_size` bytes in one anonymous mapping. Not thread-safe: its tier locks.

    Blocks are aligned to 4096 bytes, so O_DIRECT reads straight into them. Where the operating system can,
    it gives all their memory, zeroed, at construction (elsewhere at the first touch), so that no token
    waits for a page fault and a limit that the machine cannot hold shows before the first token.

    Args:
        capacity: blocks, 1 or more.
        block_size: bytes, a positive multiple of 4096.

    Raises:
        ValueError: a capacity or a size that is not so.
        OSError: the address space for it is not to be had.
    """

    def __init__(self, capacity: int, block_size: int) -> None:
        if capacity < 1 or block_size < 1 or block_size % BLOCK:
            raise ValueError(
                f"{capacity} blocks of {block_size} bytes: want at least 1, of {BLOCK}s of bytes"
            )
        self.capacity = capacity
        self.block_size = block_size
        # Private: a shared anonymous mapping counts as a file in shared memory and gets no huge pages.
        self._memory = mmap.mmap(-1, capacity * block_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel built without them refuses the advice
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        with suppress(OSError):  # Linux before 5.14 and other systems
            self._memory.madvise(_MADV_POPULATE_WRITE)
        lock_pages(self._memory)
        whole = memoryview(self._memory)
        self._views = [whole[i * block_size : (i + 1) * block_size] for i in range(capacity)]
        whole.release()
        # Last in, first out: a block that was just used is the likeliest to be in a CPU cache and a TLB.
        self._free = list(range(capacity - 1, -1, -1))
        self._taken = bytearray(capacity)
        self._fewest_free = capacity

    @property
    def available(self) -> int:
        """Blocks that are free now."""
        return len(self._free)

    @property
    def peak(self) -> int:
        """The most blocks that were ever taken at once."""
        return self.capacity - self._fewest_free

    def allocate(self) -> int | None:
        """The index of a block, the caller's until `free`; None if all are taken. Its bytes are undefined."""
        if not self._free:
            return None
        index = self._free.pop()
        self._taken[index] = 1
        self._fewest_free = min(self._fewest_free, len(self._free))
        return index

    def free(self, index: int) -> None:
        """Takes a block back.

        Raises:
            ValueError: the block is not taken.
        """
        if not (0 <= index < self.capacity and self._taken[index]):
            raise ValueError(f"block {index} of {self.capacity} is not taken")
        self._taken[index] = 0
        self._free.append(index)

    def view(self, index: int) -> memoryview:
        """A block's writable bytes, uint8 [block_size]; always the same object. Valid until close."""
        return self._views[index]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is either taken or on the free list, once."""
        assert sorted(self._free) == [i for i in range(self.capacity) if not self._taken[i]]

    def close(self) -> None:
        """Unmaps the memory. Idempotent.

        Raises:
            BufferError: somebody still looks at a block; the mapping stays.
        """
        for view in self._views:
            view.release()
        self._memory.close()
