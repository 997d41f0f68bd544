"""Blocks of different sizes with a place of their own each, of which a budget of bytes is in memory."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

from edgemoe.cache.blocks import Indices
from edgemoe.storage.base import Blocks, ExpertKey

_MAP_NORESERVE = 0x4000
"""Linux's flag for address space that reserves no swap; Python's mmap module does not define it."""


class FixedPlaces:
    """A block for each of some experts, at the same address whenever it is in memory. Not thread-safe: its tier locks.

    The mapping has addresses for all blocks and RAM for blocks with references: the pages of a block that loses its
    last one go back to the system at once. So blocks of any size leave no gaps, and tables of addresses stay valid. The
    index of a block is its expert's number among the sizes.

    Args:
        kind: name of the one kind of block.
        sizes: expert -> bytes of its block, a positive multiple of 4096.
        budget: most bytes of blocks with references.

    Raises:
        OSError: the system refuses so much address space.
    """

    def __init__(self, kind: str, sizes: Mapping[ExpertKey, int], budget: int) -> None:
        self.kinds = (kind,)
        self._numbers = {key: number for number, key in enumerate(sizes)}
        self._sizes, self._free = list(sizes.values()), budget
        self._largest = max(self._sizes, default=mmap.PAGESIZE)
        self._starts = [0, *accumulate(self._sizes)]
        whole = self._starts[-1]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._memory = mmap.mmap(-1, max(whole, mmap.PAGESIZE), flags=flags)
        if budget < whole and hasattr(mmap, "MADV_NOHUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages refuses the advice
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page is of several blocks
        self._references = [0] * len(self._sizes)
        view = memoryview(self._memory)
        self._views = [view[start:][:size] for start, size in zip(self._starts, self._sizes, strict=False)]
        view.release()

    def view(self, key: ExpertKey) -> memoryview:
        """The bytes of an expert's block, in memory or not."""
        return self._views[self._numbers[key]]

    def room(self, kinds: Sequence[str]) -> int:
        """How many more experts with a block of the largest size fit."""
        return self._free // self._largest

    def sole(self, kind: str, index: int) -> bool:
        """Whether the block has exactly one reference."""
        return self._references[index] == 1

    def place(self, key: ExpertKey, kinds: Sequence[str], without: Iterable[Indices]) -> Indices | None:
        """Finds the place of an expert's block. Changes nothing.

        Args:
            key: the expert.
            kinds: the one kind.
            without: blocks whose bytes count as free where they have no other reference.

        Returns:
            kind's name -> index; None: too few bytes are free, or the block has references still.
        """
        number, free = self._numbers[key], self._free
        if self._references[number]:
            return None
        for indices in without:
            free += sum(self._sizes[index] for kind, index in indices.items() if self.sole(kind, index))
        return {self.kinds[0]: number} if free >= self._sizes[number] else None

    def take(self, kinds: Sequence[str], yielded: Indices) -> Indices:
        """Adds a reference to the block that `place` has found, and returns it."""
        self.refer(yielded)
        return yielded

    def refer(self, indices: Indices) -> None:
        """Adds a reference to each block."""
        for index in indices.values():
            if not self._references[index]:
                self._free -= self._sizes[index]
            self._references[index] += 1

    def forget(self, indices: Indices) -> None:
        """Removes a reference from each block, and returns the pages of blocks without any."""
        for index in indices.values():
            self._references[index] -= 1
            if not self._references[index]:
                self._free += self._sizes[index]
                self._memory.madvise(mmap.MADV_DONTNEED, self._starts[index], self._sizes[index])

    def views(self, indices: Indices) -> Blocks:
        """The blocks' writable bytes."""
        return {kind: self._views[index] for kind, index in indices.items()}

    def close(self) -> None:
        """Unmaps the memory. Idempotent. Raises BufferError while a block's buffer is exported; the mapping stays."""
        for view in self._views:
            view.release()
        self._memory.close()
