"""Allocation of equal-sized blocks in constant time, independent of the memory that they lie in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from storage.base import BlockKind


class FreeList(ABC):
    """`capacity` blocks, each either free or taken. Not thread-safe: the tier that owns it locks.

    Args:
        capacity: blocks, 0 or more.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Last in, first out: the block freed last is the likeliest to be in a CPU cache and a TLB.
        self._free = list(range(capacity - 1, -1, -1))
        self._taken = bytearray(capacity)

    @property
    def available(self) -> int:
        """Free blocks."""
        return len(self._free)

    def allocate(self) -> int | None:
        """Takes a free block and returns its index; None if all are taken. The block's bytes are undefined."""
        if not self._free:
            return None
        index = self._free.pop()
        self._taken[index] = 1
        return index

    def free(self, index: int) -> None:
        """Frees a taken block.

        Raises:
            ValueError: the block is not taken.
        """
        if not (0 <= index < self.capacity and self._taken[index]):
            raise ValueError(
                f"expected a taken block, got block {index} of {self.capacity}: free each block once"
            )
        self._taken[index] = 0
        self._free.append(index)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is either taken or exactly once on the free list."""
        assert sorted(self._free) == [i for i in range(self.capacity) if not self._taken[i]]

    @abstractmethod
    def view(self, index: int) -> Any:
        """A block's writable bytes as in storage.base.Blocks: always the same object, valid until `close`."""

    @abstractmethod
    def close(self) -> None:
        """Returns the memory to the system. Idempotent.

        Raises:
            BufferError: a buffer of a block is still exported; the memory stays.
        """


Arenas = Callable[[Mapping[BlockKind, int]], Mapping[str, FreeList]]
"""Allocates a tier's memory: (kind -> blocks wanted) -> kind's name -> arena, which may have fewer blocks."""
