"""Allocation of equal-sized blocks in constant time, independent of the memory that they lie in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgemoe.storage.base import BlockKind


class FreeList:
    """Blocks of one size, each either free or taken. Not thread-safe: the tier that owns it locks.

    Args:
        views: every block's writable bytes as in storage.base.Blocks.

    Attributes:
        views: block's index -> its bytes, always the same object, valid until `close`.
        capacity: blocks in use, free or taken: the first ones of `views`.
    """

    def __init__(self, views: Sequence[Any]) -> None:
        self.views = list(views)
        self.capacity = len(self.views)
        # Last in, first out: the block freed last is the likeliest to be in a CPU cache and a TLB.
        self._free = list(range(len(views) - 1, -1, -1))

    @property
    def available(self) -> int:
        """Free blocks."""
        return len(self._free)

    def allocate(self) -> int:
        """Takes a free block, of which there must be one, and returns its index. The block's bytes are undefined."""
        return self._free.pop()

    def free(self, index: int) -> None:
        """Frees a taken block. One behind the capacity is not to be had again."""
        if index < self.capacity:
            self._free.append(index)

    def set_capacity(self, blocks: int) -> None:
        """Leaves the first `blocks` blocks in use, at most all; taken ones behind them stay taken until they are freed.

        A block that is in use again must not be taken. Its memory is another matter (`back`).
        """
        more = range(blocks - 1, self.capacity - 1, -1)
        self._free = [*more, *(index for index in self._free if index < blocks)]
        self.capacity = blocks

    def back(self, nbytes: int) -> None:
        """Gives the first `nbytes` bytes memory, and takes it from the others; a device's blocks always have theirs."""

    def close(self) -> None:
        """Drops the references to the blocks; their memory is freed with the last reference. Idempotent."""
        self.views.clear()


Arenas = Callable[[Mapping[BlockKind, int]], Mapping[str, FreeList]]
"""Allocates a tier's memory: (kind -> blocks wanted) -> kind's name -> arena, which may have fewer blocks."""
