"""Measures how fast experts come from each tier: reads of a store's own records, and copies between memories."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import accumulate, chain, cycle, islice, pairwise
from random import Random

import numpy as np

from edgemoe.cache.arena import Arena
from edgemoe.machine.device import Device
from edgemoe.storage.base import PLANES_OF_LEVEL, ExpertKey, Plane, PlaneReader
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.store.manifest import Manifest

PROBE_THREADS = 4

WINDOWS = 5
"""Parts of a measurement of memory, of which the best one counts: a machine may be slow for a moment."""

_BUFFERS = 1 << 28
"""Most bytes of the buffers that several threads read into; two threads read in any case."""


def read_speed(
    reader: PlaneReader, manifest: Manifest, level: int, seconds: float, threads: int = PROBE_THREADS
) -> float:
    """Bytes a second of whole experts up to a level, in random order, read as transfers read them.

    Args:
        reader: Reader of the store, which verifies checksums.
        manifest: Manifest of the store.
        level: 8, 4 or 2. A read fills one buffer for each plane.
        seconds: Time to measure for. Every thread reads at least one expert.
        threads: Threads that read; fewer where their buffers would take too much memory.
    """
    keys = [ExpertKey(layer, i) for layer, of in manifest.layers.items() for i in range(len(of.records))]
    Random(0).shuffle(keys)
    geometry = manifest.geometry
    threads = min(threads, max(_BUFFERS // geometry.prefix_bytes(level), 2))

    def read(number: int, buffers: list[memoryview]) -> float:
        start, done, taken = time.perf_counter(), 0, 0.0
        for key in islice(cycle(keys), number * len(keys) // threads, None):
            planes = geometry.of_layer(key.layer).planes[: PLANES_OF_LEVEL[level]]
            into = [block[: plane.length] for block, plane in zip(buffers, planes, strict=False)]
            done += reader.read(key, Plane.BASE, Plane(len(planes) - 1), into)
            taken = time.perf_counter() - start
            if taken >= seconds:
                break
        return done / taken

    with _plane_buffers(geometry, level, threads) as buffers, ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(read, range(threads), buffers))


@contextmanager
def _plane_buffers(geometry: RecordGeometry, level: int, count: int) -> Iterator[list[list[memoryview]]]:
    """Makes buffers for the planes of one record up to a level, `count` times, in memory like a tier's blocks.

    A disk read into shared memory, or into pages of 4 KiB, takes up to 1.5 times as long.
    """
    lengths = [plane.length for plane in geometry.planes[: PLANES_OF_LEVEL[level]]]
    # One mapping for all: its ends, which are no whole huge pages, are a small part of it.
    with closing(Arena(count, sum(lengths))) as arena:
        bounds = list(pairwise(accumulate(lengths, initial=0)))
        buffers = [[block[start:end] for start, end in bounds] for block in arena.views]
        try:
            yield buffers
        finally:
            for plane in chain.from_iterable(buffers):
                plane.release()


def copy_speed(device: Device | None, size: int, seconds: float) -> float:
    """Bytes per second of copies from DRAM to the fastest tier, as transfers make them.

    In RAM that is with PROBE_THREADS, to a device from pinned memory.

    Args:
        device: the device of the fastest tier; None: the tier is in RAM.
        size: bytes of a copy; twice as many are allocated meanwhile.
        seconds: duration of the measurement.
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
    """Most bytes per second of calls that move `size` bytes each, over WINDOWS, after one call that is not timed."""
    work()
    best = 0.0
    for _ in range(WINDOWS):
        start, calls, taken = time.perf_counter(), 0, 0.0
        while not calls or taken < seconds / WINDOWS:
            work()
            calls += 1
            taken = time.perf_counter() - start
        best = max(best, size * calls / taken)
    return best
