"""A tier's blocks in a device's memory, all kinds in one allocation; and blocks in RAM that it copies from."""

from __future__ import annotations

import logging
import mmap
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cache.arena import Arena
from cache.free_list import FreeList
from storage.base import BlockKind
from storage.device import Device

if TYPE_CHECKING:
    import torch

_PIECES = 16
"""Pieces that a pinned arena is registered in. What a system refuses costs at most one of them too much."""

_log = logging.getLogger("edgemoe")


class DeviceArena(FreeList):
    """Blocks of one kind in a device's memory.

    Args:
        blocks: uint8 tensors of one size.
    """

    def __init__(self, blocks: Sequence[torch.Tensor]) -> None:
        super().__init__(len(blocks))
        self._blocks = list(blocks)

    def view(self, index: int) -> torch.Tensor:
        """A block's bytes, uint8 [size]; always the same object."""
        return self._blocks[index]

    def close(self) -> None:
        """See FreeList. The allocation goes with the last block that somebody holds."""
        self._blocks.clear()


class OnDevice:
    """Arenas in one allocation of a device.

    Args:
        device: whose memory it is.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def __call__(self, counts: Mapping[BlockKind, int]) -> dict[str, FreeList]:
        """Arenas of exactly so many blocks of each kind.

        Raises:
            torch.OutOfMemoryError: the device has not so much.
        """
        rest = self._device.allocate(sum(kind.size * count for kind, count in counts.items()))
        arenas: dict[str, FreeList] = {}
        for kind, count in counts.items():
            own, rest = rest[: kind.size * count], rest[kind.size * count :]
            arenas[kind.name] = DeviceArena(own.view(count, kind.size).unbind())
        return arenas


class PinnedArena(Arena):
    """An arena in RAM whose first blocks are registered with a device. Registered a run of whole blocks at a time: no
    copy may cross the border of two registrations.

    Args:
        capacity, block_size: of Arena.
        device: that copies from it.
    """

    def __init__(self, capacity: int, block_size: int, device: Device) -> None:
        super().__init__(capacity, block_size, locked=False)
        self._device = device
        self._pinned = 0
        self._runs: list[memoryview] = []
        self._unpin = weakref.finalize(self, _unpin_all, device, self._runs)

    def pin_to(self, blocks: int) -> bool:
        """Registers the blocks before `blocks` that are not yet. False: the system refuses."""
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
        """Gives back what is not registered. Before any block is taken."""
        unpinned = range(self._pinned, self.capacity)
        if unpinned:
            self._memory.madvise(
                mmap.MADV_DONTNEED, unpinned.start * self.block_size, len(unpinned) * self.block_size
            )
            FreeList.__init__(self, self._pinned)

    def close(self) -> None:
        """See FreeList. No copy from it may be under way."""
        self._unpin()
        super().close()


class Pinned:
    """Arenas in RAM that a device copies from. Where the system refuses to pin so much, a warning says so.

    Args:
        device: that copies from them.
        name: of the tier, for the warning.
    """

    def __init__(self, device: Device, name: str) -> None:
        self._device, self._name = device, name

    def __call__(self, counts: Mapping[BlockKind, int]) -> dict[str, FreeList]:
        """Arenas of so many blocks of each kind, or of as large a share of each as can be pinned.

        Raises:
            OSError: the memory is not to be had.
        """
        arenas = {kind.name: PinnedArena(count, kind.size, self._device) for kind, count in counts.items()}
        if not all(
            arena.pin_to(arena.capacity * piece // _PIECES)
            for piece in range(1, _PIECES + 1)
            for arena in arenas.values()
        ):
            wanted = sum(arena.capacity * arena.block_size for arena in arenas.values())
            for arena in arenas.values():
                arena.keep_pinned()
            _log.warning(
                "%s: %d bytes of memory were to be pinned, and the system allows %d: fewer experts stay there. "
                "Raise the limit of locked memory (ulimit -l), or ask for less",
                self._name,
                wanted,
                sum(arena.capacity * arena.block_size for arena in arenas.values()),
            )
        return dict(arenas)


def _unpin_all(device: Device, runs: list[memoryview]) -> None:
    while runs:
        run = runs.pop()
        device.unpin(run)
        run.release()
