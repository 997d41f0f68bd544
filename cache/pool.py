"""One pool of bytes for blocks of every kind: a block is a run of neighbouring units, wherever one is free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from edgemoe.cache.blocks import Arenas, Indices
from edgemoe.storage.base import BLOCK, BlockKind, Blocks, ExpertKey

_POOL = "pool"
"""Name of the one block that the arenas are allocated as."""


class Pool:
    """The blocks of a tier in one pool; a unit without references is free. Not thread-safe: its tier locks.

    Blocks of the lowest kind lie from the front on and all others from the back on, so that two kinds leave no gaps of
    the wrong size but where one replaces the other. A block's index is its first unit.

    Args:
        kinds: the kinds of the tier's form.
        capacity: kind's name -> blocks, which the pool has the bytes of; a kind that is absent, or has 0, has no place.
        arenas: allocates the memory.

    Attributes:
        arenas: name -> the one block that is cut, empty without memory.

    Raises:
        OSError, torch.OutOfMemoryError: the system or the device refuses so much memory.
    """

    def __init__(self, kinds: Iterable[BlockKind], capacity: Mapping[str, int], arenas: Arenas) -> None:
        sizes = {kind.name: kind.size for kind in kinds if capacity.get(kind.name)}
        self._unit = math.gcd(*sizes.values()) or BLOCK
        size = sum(capacity[name] * each for name, each in sizes.items())
        self.arenas = arenas({BlockKind(_POOL, size, 2): 1} if size else {})
        allocated = bool(self.arenas) and self.arenas[_POOL].capacity == 1
        self._memory: Any = self.arenas[_POOL].views[0] if allocated else None
        self._units = {name: each // self._unit for name, each in sizes.items()} if allocated else {}
        self._references = bytearray(size // self._unit if allocated else 0)
        self._counts = np.frombuffer(self._references, np.uint8)
        self._in_use = len(self._references)
        self._views: dict[tuple[str, int], Any] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds that have a place in the pool, in the form's order."""
        return tuple(self._units)

    def room(self, kinds: Sequence[str]) -> int:
        """How many more experts with a block of each kind fit."""
        free, count = self._free(()), 0
        while self._place(kinds, free) is not None:
            count += 1
        return count

    def sole(self, kind: str, index: int) -> bool:
        """Whether every unit of the block has exactly one reference."""
        return bool((self._run(kind, index) == 1).all())

    def place(self, key: ExpertKey, kinds: Sequence[str], without: Iterable[Indices]) -> Indices | None:
        """Finds places for a block of each kind. Changes nothing.

        Args:
            key: the expert; a pool's places are for any.
            kinds: names of the kinds, in the form's order.
            without: blocks whose units count as free where they have no other reference.

        Returns:
            kind's name -> index; None: too few neighbouring units are free.
        """
        return self._place(kinds, self._free(without))

    def take(self, kinds: Sequence[str], yielded: Indices) -> Indices:
        """Adds a reference to every unit of the places that `place` has found for all of `kinds`; returns them."""
        self.refer(yielded)
        return yielded

    def refer(self, indices: Indices) -> None:
        """Adds a reference to every unit of each block."""
        for kind, index in indices.items():
            self._run(kind, index)[:] += 1

    def forget(self, indices: Indices) -> None:
        """Removes a reference from every unit of each block; units without any are free."""
        for kind, index in indices.items():
            self._run(kind, index)[:] -= 1

    def exceeds(self, kind: str, capacity: Mapping[str, int]) -> bool:
        """Whether more units have references than the blocks of `capacity` have in all."""
        return int(np.count_nonzero(self._counts)) > self._units_of(capacity)

    def set_capacity(self, capacity: Mapping[str, int]) -> None:
        """Leaves the units of so many blocks in use; blocks after them must be `relocate`d.

        Args:
            capacity: kind's name -> blocks, at most as many as were allocated.
        """
        self._in_use = self._units_of(capacity)

    def leaving(self, indices: Indices) -> list[str]:
        """Kinds of blocks with units that are not in use any more."""
        return [kind for kind, index in indices.items() if index + self._units[kind] > self._in_use]

    def relocate(self, indices: Indices, kinds: Sequence[str]) -> Indices | None:
        """Takes other places for the blocks that leave, and adds a reference to each of the others.

        Returns:
            kind's name -> index; None: too few neighbouring units are free.
        """
        places = self._place(kinds, self._free(()))
        return None if places is None else self.take(kinds, indices | places)

    def fit_memory(self) -> None:
        """Returns the memory of units that are not in use, or takes memory for units that are in use again."""
        for arena in self.arenas.values():
            arena.back(self._in_use * self._unit)

    def views(self, indices: Indices) -> Blocks:
        """The blocks' writable bytes; a block at the same place is always the same object."""
        blocks: Blocks = {}
        for kind, index in indices.items():
            if (kind, index) not in self._views:
                start, stop = index * self._unit, (index + self._units[kind]) * self._unit
                self._views[kind, index] = self._memory[start:stop]
            blocks[kind] = self._views[kind, index]
        return blocks

    def close(self) -> None:
        """Returns the memory to the system. Idempotent. Raises BufferError while a block's buffer is exported."""
        self._memory = None
        for view in self._views.values():
            if isinstance(view, memoryview):
                view.release()
        for arena in self.arenas.values():
            arena.close()

    def _units_of(self, capacity: Mapping[str, int]) -> int:
        return sum(capacity.get(kind, 0) * units for kind, units in self._units.items())

    def _run(self, kind: str, index: int) -> Any:
        return self._counts[index : index + self._units[kind]]

    def _free(self, without: Iterable[Indices]) -> bytearray:
        """The units' references, 0 where the blocks of `without` have the only one, 1 where they are not in use."""
        free = bytearray(self._references)
        for indices in without:
            for kind, index in indices.items():
                if self.sole(kind, index):
                    free[index : index + self._units[kind]] = bytes(self._units[kind])
        if self._in_use < len(free):
            free[self._in_use :] = b"\1" * (len(free) - self._in_use)
        return free

    def _place(self, kinds: Sequence[str], free: bytearray) -> Indices | None:
        """Takes a block of each kind from `free`."""
        indices: Indices = {}
        for kind in kinds:
            units, front = self._units[kind], kind == self.kinds[0]
            index = (free.find if front else free.rfind)(bytes(units))
            if index < 0:
                return None
            free[index : index + units] = b"\1" * units
            indices[kind] = index
        return indices
