"""Measures how fast experts come from each tier: reads of a store's own records, and copies between memories."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np

from edgemoe.machine.device import Device
from edgemoe.storage.base import PLANES_OF_LEVEL, ExpertKey, Plane
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.reader import RecordReader

PROBE_THREADS = 4


def read_speed(reader: RecordReader, manifest: Manifest, level: int, seconds: float) -> float:
    """Bytes a second of whole experts up to a level, in random order, with PROBE_THREADS, checksums verified."""
    layers = manifest.layers.items()
    keys = [ExpertKey(layer, expert) for layer, of in layers for expert in range(len(of.records))]
    Random(0).shuffle(keys)
    size = manifest.geometry.prefix_bytes(level)
    last = Plane(PLANES_OF_LEVEL[level] - 1)
    start = time.perf_counter()

    def read(part: Sequence[ExpertKey]) -> int:
        done = 0
        with mmap.mmap(-1, size) as buffer, memoryview(buffer) as view:
            for key in part:
                if done and time.perf_counter() - start > seconds:
                    break
                done += reader.read(key, Plane.BASE, last, [view])
        return done

    with ThreadPoolExecutor(PROBE_THREADS) as pool:
        total = sum(pool.map(read, (keys[i::PROBE_THREADS] for i in range(PROBE_THREADS))))
    return total / (time.perf_counter() - start)


def copy_speed(device: Device | None, size: int, seconds: float) -> float:
    """Bytes a second of copies from DRAM to the fastest tier, as transfers make them.

    In RAM that is with PROBE_THREADS, to a device from pinned memory.

    Args:
        device: that has the fastest tier; None: it is in RAM.
        size: bytes of a copy; twice as many are allocated meanwhile.
        seconds: to measure for.
    """
    if device is None:
        source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
        parts = [np.array_split(whole, PROBE_THREADS) for whole in (target, source)]
        with ThreadPoolExecutor(PROBE_THREADS) as pool:
            return speed_of(lambda: list(pool.map(np.copyto, *parts)), size, seconds)
    with mmap.mmap(-1, size) as memory, memoryview(memory) as host:
        block, pinned = device.allocate(size), device.pin(host)
        try:
            return speed_of(lambda: device.copy([(host, block)], None).wait(), size, seconds)
        finally:
            if pinned:
                device.unpin(host)


def speed_of(work: Callable[[], object], size: int, seconds: float) -> float:
    """Bytes a second of work that moves `size` bytes a call, after one call that is not timed."""
    work()
    start, times = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        work()
        times += 1
    return size * times / (time.perf_counter() - start)
