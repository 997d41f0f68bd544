"""Blocks of one size, handed out in constant time, wherever they lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from storage.base import BlockKind


class FreeList(ABC):
    """`capacity` blocks, each free or somebody's. Not thread-safe: its tier locks.

    Args:
        capacity: blocks, 0 or more.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
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

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is either taken or on the free list, once."""
        assert sorted(self._free) == [i for i in range(self.capacity) if not self._taken[i]]

    @abstractmethod
    def view(self, index: int) -> Any:
        """A block's writable bytes, as storage.base.Blocks has them; always the same object. Valid until close."""

    @abstractmethod
    def close(self) -> None:
        """Gives the memory back. Idempotent.

        Raises:
            BufferError: somebody still looks at a block; the memory stays.
        """


Arenas = Callable[[Mapping[BlockKind, int]], Mapping[str, FreeList]]
"""Where a tier's blocks lie: blocks wanted of each kind -> an arena for each kind's name, maybe of fewer blocks."""
