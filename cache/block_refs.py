"""Blocks of several kinds that know how many states of experts refer to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from cache.arena import in_ram
from cache.free_list import Arenas
from storage.base import BlockKind, Blocks

Indices = dict[str, int]
"""Block kind's name -> index in that kind's arena."""


class SharedBlocks:
    """One arena per kind; a block goes back to it with the last reference. Not thread-safe: its tier locks.

    Args:
        kinds: of the form whose experts are kept here.
        capacity: kind's name -> blocks; a kind that is absent, or has 0, has no arena.
        arenas: where they lie. It may give fewer blocks than asked.

    Raises:
        ValueError: a capacity for an unknown kind, or a negative one.
        OSError: the memory is not to be had.
    """

    def __init__(
        self, kinds: Iterable[BlockKind], capacity: Mapping[str, int], arenas: Arenas = in_ram
    ) -> None:
        known = {kind.name: kind for kind in kinds}
        if unknown := capacity.keys() - known.keys():
            raise ValueError(f"capacity for {sorted(unknown)}, but the form's kinds are {sorted(known)}")
        made = arenas({kind: capacity[name] for name, kind in known.items() if capacity.get(name)})
        self._arenas = {name: arena for name, arena in made.items() if arena.capacity}
        self._references = {name: [0] * arena.capacity for name, arena in self._arenas.items()}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds that there are blocks of, in the form's order."""
        return tuple(self._arenas)

    def available(self, kind: str) -> int:
        """Blocks of a kind that nothing refers to."""
        return self._arenas[kind].available

    def sole(self, kind: str, index: int) -> bool:
        """Whether one reference is all that keeps a block from being free."""
        return self._references[kind][index] == 1

    def take(self, kind: str) -> int:
        """The index of a block that was free, with one reference now. There must be one."""
        index = self._arenas[kind].allocate()
        assert index is not None
        self._references[kind][index] = 1
        return index

    def refer(self, indices: Indices) -> None:
        """Adds a reference to each of some blocks that have one already."""
        for kind, index in indices.items():
            self._references[kind][index] += 1

    def forget(self, indices: Indices) -> None:
        """Takes a reference from each block; those without any are free."""
        for kind, index in indices.items():
            counts = self._references[kind]
            counts[index] -= 1
            if not counts[index]:
                self._arenas[kind].free(index)

    def views(self, indices: Indices) -> Blocks:
        """The blocks' writable bytes."""
        return {kind: self._arenas[kind].view(index) for kind, index in indices.items()}

    def peak(self) -> dict[str, int]:
        """Kind's name -> the most blocks that were ever referred to at once."""
        return {kind: arena.peak for kind, arena in self._arenas.items()}

    def check_integrity(self, expected: Counter[tuple[str, int]]) -> None:
        """Raises AssertionError unless (kind, index) has the references expected, and the rest is free."""
        for kind, arena in self._arenas.items():
            arena.check_integrity()
            counts = self._references[kind]
            assert counts == [expected[kind, index] for index in range(arena.capacity)]
            assert arena.available == counts.count(0)

    def close(self) -> None:
        """Unmaps the memory. Idempotent. Raises BufferError where somebody still looks at a block."""
        for arena in self._arenas.values():
            arena.close()
