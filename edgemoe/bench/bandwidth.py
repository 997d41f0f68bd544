"""Bytes a second of each tier, measured in the same run as the times they explain."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from edgemoe.engine.engine import StoreModel
from storage.base import PLANES_OF_LEVEL, ExpertKey, Plane
from storage.device import Device
from storage.reader import RecordReader

PROBE_SECONDS = 1.0
"""How long each bandwidth is measured for."""

PROBE_THREADS = 4

PROBE_BYTES = 1 << 27
"""Memory that is copied or read: more than caches hold."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second.

    Args:
        ssd: level -> reading whole experts up to it, in random order, PROBE_THREADS at a time, checksums verified.
        dram: copying, as moves between tiers do: PROBE_THREADS at a time, or from pinned memory to a device.
        vram: reading, all compute threads, as a kernel does; or a device's reading its own memory.
        direct: whether the reads went past the page cache.
    """

    ssd: dict[int, float]
    dram: float
    vram: float
    direct: bool

    def of_levels(self, levels: Iterable[int]) -> dict[str, float]:
        """Per tier, for a setting with these levels: the disk's best, so that the bound stays a bound."""
        return {
            "ssd": max(self.ssd[level] for level in levels if level),
            "dram": self.dram,
            "vram": self.vram,
        }


def measure(store: StoreModel, levels: Iterable[int]) -> Bandwidth:
    """Measures every tier now, the disk at each of `levels` but 0. Allocates some 400 MB for a moment."""
    reader = RecordReader.open(store.directory, store.manifest)
    try:
        ssd = {level: _ssd(reader, store, level) for level in sorted(levels) if level}
        direct = reader.direct
    finally:
        reader.close()
    if store.device:
        return Bandwidth(ssd, _copy_to(store.device), _read_on(store.device), direct)
    return Bandwidth(ssd, _copy(), _read(), direct)


def best(probes: list[Bandwidth]) -> Bandwidth:
    """The best of each: a disk that was slow for one second is not a slow disk."""
    return Bandwidth(
        ssd={level: max(probe.ssd[level] for probe in probes) for level in probes[0].ssd},
        dram=max(probe.dram for probe in probes),
        vram=max(probe.vram for probe in probes),
        direct=all(probe.direct for probe in probes),
    )


def _ssd(reader: RecordReader, store: StoreModel, level: int) -> float:
    keys = [
        ExpertKey(layer, expert)
        for layer, records in store.manifest.layers.items()
        for expert in range(len(records.records))
    ]
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(0)).tolist()
    size = store.manifest.geometry.prefix_bytes(level)
    last = Plane(PLANES_OF_LEVEL[level] - 1)
    start = time.perf_counter()

    def read(share: list[int]) -> int:
        done = 0
        with mmap.mmap(-1, size) as buffer:
            view = memoryview(buffer)
            for index in share:
                if done and time.perf_counter() - start > PROBE_SECONDS:
                    break
                done += reader.read(keys[index], Plane.BASE, last, [view])
            view.release()
        return done

    with ThreadPoolExecutor(PROBE_THREADS) as pool:
        total = sum(pool.map(read, (order[i::PROBE_THREADS] for i in range(PROBE_THREADS))))
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
    with mmap.mmap(-1, PROBE_BYTES) as memory:
        source, target = memoryview(memory), device.allocate(PROBE_BYTES)
        pinned = device.pin(source)
        try:
            return _rate(lambda: device.copy([(source, target)], None).wait(), PROBE_BYTES)
        finally:
            if pinned:
                device.unpin(source)
            source.release()


_READS = 16
"""Reads of a device's memory between two waits for it."""


def _read_on(device: Device) -> float:
    data = torch.ones(PROBE_BYTES, dtype=torch.float32, device=device.place)

    def read() -> None:
        for _ in range(_READS):
            data.sum()
        device.computed().wait()

    return _rate(read, _READS * data.nbytes)


def _rate(work: Callable[[], object], size: int) -> float:
    work()
    start, times = time.perf_counter(), 0
    while time.perf_counter() - start < PROBE_SECONDS / 2:
        work()
        times += 1
    return size * times / (time.perf_counter() - start)
