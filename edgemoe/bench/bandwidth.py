"""Bytes per second of each tier, measured in the same run as the times that they explain."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from edgemoe.engine.engine import StoreModel
from storage.base import PLANES_OF_LEVEL, ExpertKey, Plane
from storage.device import Device
from storage.reader import RecordReader

PROBE_SECONDS = 1.0
"""Seconds that each bandwidth is measured for."""

PROBE_THREADS = 4

PROBE_BYTES = 1 << 27
"""Bytes of memory to copy or read: more than the processor's caches hold."""

_READS_PER_WAIT = 16
"""Reads of a device's memory between two synchronisations."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second.

    Args:
        ssd: level -> reading whole experts up to it, in random order, with PROBE_THREADS, checksums verified.
        dram: copying, as transfers between tiers do: with PROBE_THREADS, or from pinned memory to a device.
        vram: reading with all compute threads, as a kernel does; on a device, reading its own memory.
        direct: whether the reads bypassed the page cache.
    """

    ssd: dict[int, float]
    dram: float
    vram: float
    direct: bool

    def of_levels(self, levels: Iterable[int]) -> dict[str, float]:
        """Returns tier -> bytes per second for a setting with these levels: the best of the disk, for a bound."""
        ssd = max(self.ssd[level] for level in levels if level)
        return {"ssd": ssd, "dram": self.dram, "vram": self.vram}


def measure(store: StoreModel, levels: Iterable[int]) -> Bandwidth:
    """Measures every tier now, the disk at each of `levels` but 0. Allocates some 400 MB meanwhile."""
    with closing(RecordReader.open(store.directory, store.manifest)) as reader:
        ssd = {level: _read_disk(reader, store, level) for level in sorted(levels) if level}
        direct = reader.direct
    if store.device:
        return Bandwidth(ssd, _copy_to(store.device), _read_on(store.device), direct)
    return Bandwidth(ssd, _copy(), _read(), direct)


def best(probes: Sequence[Bandwidth]) -> Bandwidth:
    """Returns the best of each tier over all probes: one slow second does not make a slow disk."""
    return Bandwidth(
        ssd={level: max(probe.ssd[level] for probe in probes) for level in probes[0].ssd},
        dram=max(probe.dram for probe in probes),
        vram=max(probe.vram for probe in probes),
        direct=all(probe.direct for probe in probes),
    )


def _read_disk(reader: RecordReader, store: StoreModel, level: int) -> float:
    layers = store.manifest.layers.items()
    keys = [ExpertKey(layer, expert) for layer, of in layers for expert in range(len(of.records))]
    Random(0).shuffle(keys)
    size = store.manifest.geometry.prefix_bytes(level)
    last = Plane(PLANES_OF_LEVEL[level] - 1)
    start = time.perf_counter()

    def read(part: Sequence[ExpertKey]) -> int:
        done = 0
        with mmap.mmap(-1, size) as buffer, memoryview(buffer) as view:
            for key in part:
                if done and time.perf_counter() - start > PROBE_SECONDS:
                    break
                done += reader.read(key, Plane.BASE, last, [view])
        return done

    with ThreadPoolExecutor(PROBE_THREADS) as pool:
        total = sum(pool.map(read, (keys[i::PROBE_THREADS] for i in range(PROBE_THREADS))))
    return total / (time.perf_counter() - start)


def _copy() -> float:
    source, target = np.ones(PROBE_BYTES, np.uint8), np.ones(PROBE_BYTES, np.uint8)
    parts = [np.array_split(whole, PROBE_THREADS) for whole in (target, source)]
    with ThreadPoolExecutor(PROBE_THREADS) as pool:
        return _rate(lambda: list(pool.map(np.copyto, *parts)), source.nbytes)


def _read() -> float:
    data = torch.ones(PROBE_BYTES // 4, dtype=torch.float32)
    return _rate(data.sum, data.nbytes)


def _copy_to(device: Device) -> float:
    with mmap.mmap(-1, PROBE_BYTES) as memory, memoryview(memory) as source:
        target, pinned = device.allocate(PROBE_BYTES), device.pin(source)
        try:
            return _rate(lambda: device.copy([(source, target)], None).wait(), PROBE_BYTES)
        finally:
            if pinned:
                device.unpin(source)


def _read_on(device: Device) -> float:
    data = torch.ones(PROBE_BYTES, dtype=torch.float32, device=device.place)

    def read() -> None:
        for _ in range(_READS_PER_WAIT):
            data.sum()
        device.computed().wait()

    return _rate(read, _READS_PER_WAIT * data.nbytes)


def _rate(work: Callable[[], object], size: int) -> float:
    """Bytes per second of work that moves `size` bytes a call, after one call that is not timed."""
    work()
    start, times = time.perf_counter(), 0
    while time.perf_counter() - start < PROBE_SECONDS / 2:
        work()
        times += 1
    return size * times / (time.perf_counter() - start)
