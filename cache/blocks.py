"""Blocks of one size per kind: which are free, and how many states of experts refer to each of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from edgemoe.storage.base import BlockKind, Blocks

Indices = dict[str, int]
"""Block kind's name -> index in that kind's arena."""


class FreeList:
    """Blocks of one size, each either free or taken. Not thread-safe: the tier that owns it locks.

    Args:
        views: every block's writable bytes as in storage.base.Blocks.

    Attributes:
        views: block's index -> its bytes, always the same object, valid until `close`.
        capacity: blocks in use, free or taken: the first ones of `views`.
        unused: indices of the free blocks; the last is taken next.
    """

    def __init__(self, views: Sequence[Any]) -> None:
        self.views = list(views)
        self.capacity = len(self.views)
        # Last in, first out: the block freed last is the likeliest to be in a CPU cache and a TLB.
        self.unused = list(range(len(views) - 1, -1, -1))

    @property
    def available(self) -> int:
        """Free blocks."""
        return len(self.unused)

    def free(self, index: int) -> None:
        """Frees a taken block. A block beyond the capacity cannot be taken again."""
        if index < self.capacity:
            self.unused.append(index)

    def set_capacity(self, blocks: int) -> None:
        """Leaves the first `blocks` blocks in use, at most all; taken ones after them stay taken until they are freed.

        A block that is in use again must not be taken. Its memory is another matter (`back`).
        """
        more = range(blocks - 1, self.capacity - 1, -1)
        self.unused = [*more, *(index for index in self.unused if index < blocks)]
        self.capacity = blocks

    def back(self, nbytes: int) -> None:
        """Gives the first `nbytes` bytes memory, and takes it from the others; a device's blocks always have theirs."""

    def close(self) -> None:
        """Drops the references to the blocks; their memory is freed with the last reference. Idempotent."""
        self.views.clear()


Arenas = Callable[[Mapping[BlockKind, int]], Mapping[str, FreeList]]
"""Allocates a tier's memory: (kind -> blocks wanted) -> kind's name -> arena, which may have fewer blocks."""


class SharedBlocks:
    """One arena per kind; a block is freed with its last reference. Not thread-safe: the tier that owns it locks.

    Several states of an expert share the blocks that they have in common.

    Args:
        kinds: the kinds of the tier's form.
        capacity: kind's name -> blocks; a kind that is absent, or has 0, gets no arena.
        arenas: allocates the memory; may return fewer blocks than `capacity`.

    Attributes:
        arenas: kind's name -> its blocks.
        references: kind's name -> references to each block.

    Raises:
        OSError, torch.OutOfMemoryError: the system or the device refuses so much memory.
    """

    def __init__(self, kinds: Iterable[BlockKind], capacity: Mapping[str, int], arenas: Arenas) -> None:
        made = arenas({kind: capacity[kind.name] for kind in kinds if capacity.get(kind.name)})
        self.arenas = {name: arena for name, arena in made.items() if arena.capacity}
        self.references = {name: [0] * arena.capacity for name, arena in self.arenas.items()}
        self._views = {name: arena.views for name, arena in self.arenas.items()}
        self._backed = {name: arena.capacity * len(arena.views[0]) for name, arena in self.arenas.items()}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds with at least one block, in the form's order."""
        return tuple(self.arenas)

    def room(self, kinds: Sequence[str]) -> int:
        """How many more experts with a block of each kind fit."""
        return min(self.arenas[kind].available for kind in kinds)

    def sole(self, kind: str, index: int) -> bool:
        """Whether the block has exactly one reference."""
        return self.references[kind][index] == 1

    def take(self, kinds: Iterable[str], yielded: Indices) -> Indices:
        """Adds a reference to yielded blocks, and takes a free block, of which there must be one, of each other kind.

        Returns:
            kind's name -> index, for each of `kinds`.
        """
        indices: Indices = {}
        for kind in kinds:
            if kind in yielded:
                index = indices[kind] = yielded[kind]
                self.references[kind][index] += 1
            else:
                index = indices[kind] = self.arenas[kind].unused.pop()
                self.references[kind][index] = 1
        return indices

    def refer(self, indices: Indices) -> None:
        """Adds a reference to each block; each must already have one."""
        for kind, index in indices.items():
            self.references[kind][index] += 1

    def forget(self, indices: Indices) -> None:
        """Removes a reference from each block and frees the blocks without any."""
        for kind, index in indices.items():
            counts = self.references[kind]
            counts[index] -= 1
            if not counts[index]:
                self.arenas[kind].free(index)

    def exceeds(self, kind: str, capacity: Mapping[str, int]) -> bool:
        """Whether more blocks of a kind have references than `capacity` has."""
        arena = self.arenas[kind]
        return arena.capacity - arena.available > capacity.get(kind, 0)

    def set_capacity(self, capacity: Mapping[str, int]) -> None:
        """Leaves the first blocks of each kind in use; later ones that have references must be `relocate`d.

        Args:
            capacity: kind's name -> number of blocks, at most as many as were allocated; no kind `exceeds` it.
        """
        for kind, arena in self.arenas.items():
            arena.set_capacity(capacity.get(kind, 0))

    def leaving(self, indices: Indices) -> list[str]:
        """Kinds of blocks that are not in use any more."""
        return [kind for kind, index in indices.items() if index >= self.arenas[kind].capacity]

    def relocate(self, indices: Indices, kinds: Sequence[str]) -> Indices | None:
        """Takes other blocks in place of the blocks of these kinds, and adds a reference to each of the others.

        Returns:
            kind's name -> index; None: there is no place.
        """
        return self.take(indices, {kind: index for kind, index in indices.items() if kind not in kinds})

    def fit_memory(self) -> None:
        """Returns the memory of blocks that are not in use, then takes memory for blocks that are in use again."""
        for grows in (False, True):
            for kind, arena in self.arenas.items():
                nbytes = arena.capacity * len(arena.views[0])
                if (nbytes > self._backed[kind]) == grows:
                    arena.back(nbytes)
                    self._backed[kind] = nbytes

    def views(self, indices: Indices) -> Blocks:
        """The blocks' writable bytes."""
        blocks: Blocks = {}
        for kind, index in indices.items():
            blocks[kind] = self._views[kind][index]
        return blocks

    def close(self) -> None:
        """Returns the memory to the system. Idempotent. Raises BufferError while a block's buffer is exported."""
        for arena in self.arenas.values():
            arena.close()
