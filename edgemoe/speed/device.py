"""Measures how much memory can be pinned for a device, and the speed of copies from there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from edgemoe.cache.device_arena import PinnedArena
from edgemoe.machine.device import Device

PIECE = 1 << 26
"""Bytes pinned, and copied, at a time."""

_COPIES = 16


@dataclass(frozen=True)
class DeviceSpeed:
    """A measurement.

    Args:
        tried: bytes to pin.
        pinned: bytes that the system has pinned.
        copied: bytes per second from pinned memory to the device; None where nothing was pinned.
    """

    tried: int
    pinned: int
    copied: float | None


def measure_device(device: Device, size: int, clock: Callable[[], float] = time.perf_counter) -> DeviceSpeed:
    """Pins memory, copies from it and releases it. Takes a second per few gigabytes.

    Args:
        device: the device that is measured.
        size: bytes to pin, rounded down to whole PIECEs, at least one.
        clock: seconds.
    """
    with closing(PinnedArena(max(size // PIECE, 1), PIECE, device)) as arena:
        pieces = 0
        while pieces < arena.capacity and arena.pin_to(pieces + 1):
            pieces += 1
        copied = _copy_speed(device, arena, pieces, clock) if pieces else None
        return DeviceSpeed(arena.capacity * PIECE, pieces * PIECE, copied)


def _copy_speed(device: Device, arena: PinnedArena, pieces: int, clock: Callable[[], float]) -> float:
    target = device.allocate(PIECE)
    device.copy([(arena.views[0], target)], None).wait()  # warm-up: the first copy initializes the device
    start = clock()
    for copy in [device.copy([(arena.views[i % pieces], target)], None) for i in range(_COPIES)]:
        copy.wait()
    return _COPIES * PIECE / (clock() - start)
