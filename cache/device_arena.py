"""A tier's blocks in a device's memory, all kinds in one allocation; and blocks in RAM pinned for copies to it."""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Mapping

from edgemoe.cache.arena import Arena
from edgemoe.cache.blocks import FreeList
from edgemoe.machine.device import Device
from edgemoe.storage.base import BlockKind

_STEPS = 16
"""Steps in which an arena is pinned: a refusal by the system leaves at most one step too little pinned."""

_log = logging.getLogger("edgemoe")


def on_device(device: Device, counts: Mapping[BlockKind, int]) -> dict[str, FreeList]:
    """Allocates an arena for each kind, with exactly `counts` blocks, all in one allocation of a device.

    With its device bound, an implementation of Arenas.

    Raises:
        torch.OutOfMemoryError: the device has too little free memory.
    """
    rest = device.allocate(sum(kind.size * count for kind, count in counts.items()))
    arenas: dict[str, FreeList] = {}
    for kind, count in counts.items():
        own, rest = rest[: kind.size * count], rest[kind.size * count :]
        arenas[kind.name] = FreeList(own.view(count, kind.size).unbind())
    return arenas


class PinnedArena(Arena):
    """An arena in RAM whose first blocks are pinned for a device, in runs of whole blocks.

    A run is one registration with the device, and no copy may cross the border of two registrations.

    Args:
        capacity: blocks, 1 or more.
        block_size: bytes, a positive multiple of 4096.
        device: the device that copies from the blocks.
    """

    def __init__(self, capacity: int, block_size: int, device: Device) -> None:
        super().__init__(capacity, block_size, locked=False)
        self._device = device
        self._pinned = 0
        self._runs: list[memoryview] = []
        self._unpin = weakref.finalize(self, _unpin_all, device, self._runs)

    def pin_to(self, blocks: int) -> bool:
        """Pins the first `blocks` blocks as far as they are not pinned yet. False: the system refuses."""
        if blocks == self._pinned:
            return True
        run = memoryview(self._memory)[self._pinned * self.block_size : blocks * self.block_size]
        if not self._device.pin(run):
            run.release()
            return False
        self._runs.append(run)
        self._pinned = blocks
        return True

    def keep_pinned(self) -> None:
        """Returns the memory of unpinned blocks to the system and reduces `capacity`. No block may be taken."""
        if self._pinned < self.capacity:
            start = self._pinned * self.block_size
            self._memory.madvise(mmap.MADV_DONTNEED, start, self.capacity * self.block_size - start)
            FreeList.__init__(self, self.views[: self._pinned])

    def close(self) -> None:
        """Unpins and unmaps the memory. No copy from it may be under way. Idempotent.

        Raises:
            BufferError: a buffer of a block is still exported; the mapping stays, unpinned.
        """
        self._unpin()
        super().close()


def pinned(device: Device, name: str, counts: Mapping[BlockKind, int]) -> dict[str, FreeList]:
    """Allocates an arena in RAM for each kind, pinned for copies to a device.

    An arena has `counts` blocks, or the largest equal fraction that can be pinned: then a warning is logged. With its
    first two arguments bound, an implementation of Arenas.

    Args:
        device: the device that copies from the blocks.
        name: the name of the tier, for the warning.
        counts: blocks wanted of each kind.

    Raises:
        OSError: the system refuses so much memory.
    """
    arenas = {kind.name: PinnedArena(count, kind.size, device) for kind, count in counts.items()}

    def size() -> int:
        return sum(arena.capacity * arena.block_size for arena in arenas.values())

    if not all(
        arena.pin_to(arena.capacity * step // _STEPS)
        for step in range(1, _STEPS + 1)
        for arena in arenas.values()
    ):
        wanted = size()
        for arena in arenas.values():
            arena.keep_pinned()
        _log.warning(
            "%s: expected to pin %d bytes of memory, the system allows %d, and fewer experts stay there: "
            "raise the limit of locked memory (ulimit -l) or use a smaller memory limit",
            *(name, wanted, size()),
        )
    return dict(arenas)


def _unpin_all(device: Device, runs: list[memoryview]) -> None:
    while runs:
        run = runs.pop()
        device.unpin(run)
        run.release()
