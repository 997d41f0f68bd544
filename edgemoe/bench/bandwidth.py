"""Bytes per second of each tier, measured in the same run as the times that they explain.

They are for a bound, so every probe reads as the engine does, in the ways that are fastest anywhere, and keeps the
best of several: a step cannot move its bytes faster, and one slow moment does not make a slow disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from functools import partial

import torch

from edgemoe.engine.engine import StoreModel
from edgemoe.kernels.native import library as native
from edgemoe.machine.device import Device
from edgemoe.machine.pages import in_huge_pages
from edgemoe.prefetch.workers import SCAN_WORKERS
from edgemoe.speed.rates import Rates
from edgemoe.speed.tiers import copy_speed, read_speed, speed_of
from edgemoe.storage.base import PlaneReader
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.reader import RecordReader

PROBE_SECONDS = 1.0
"""Seconds that each bandwidth is measured for."""

PROBE_BYTES = 1 << 27
"""Bytes of memory to copy or read: more than the processor's caches hold."""

READERS = 2, 4, SCAN_WORKERS
"""Numbers of threads that read from the disk at once: a token's readers, and a prompt's."""

ROUNDS = 2
"""Measurements of the disk with each number of READERS, of which the best one counts."""

_COLUMNS = 2048
"""Columns of the weight whose product shows how fast a kernel reads memory."""

_READS_PER_WAIT = 16
"""Reads of a device's memory between two synchronisations."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second.

    Args:
        ssd: level -> reading whole experts up to it by the engine's own reader, in random order, checksums verified;
            the best number of READERS.
        dram: copying, as transfers between tiers do: with PROBE_THREADS, or from pinned memory to a device.
        vram: reading with all compute threads: the faster of a sum and of the kernel's product with one row; on a
            device, reading its own memory.
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
        ssd = {level: disk_speed(reader, store.manifest, level) for level in sorted(levels) if level}
        direct = reader.direct
    dram = copy_speed(store.device, PROBE_BYTES, PROBE_SECONDS / 2)
    return Bandwidth(ssd, dram, read_device(store.device) if store.device else read_memory(), direct)


def disk_speed(reader: PlaneReader, manifest: Manifest, level: int) -> float:
    """Highest rate, in bytes per second, of reads of whole experts up to a level, over all READERS and ROUNDS."""
    seconds = PROBE_SECONDS / len(READERS) / ROUNDS
    return max(read_speed(reader, manifest, level, seconds, threads) for threads in READERS * ROUNDS)


def best(probes: Sequence[Bandwidth]) -> Bandwidth:
    """Returns the best of each tier over all probes: one slow second does not make a slow disk."""
    return Bandwidth(
        ssd={level: max(probe.ssd[level] for probe in probes) for level in probes[0].ssd},
        dram=max(probe.dram for probe in probes),
        vram=max(probe.vram for probe in probes),
        direct=all(probe.direct for probe in probes),
    )


def read_memory() -> float:
    """Bytes a second of the fastest read of RAM, from huge pages, in which dense weights and experts lie too."""
    rows = PROBE_BYTES // _COLUMNS
    weight = torch.ones(rows, _COLUMNS, dtype=torch.int8)
    in_huge_pages([weight])
    rates = [speed_of(weight.view(torch.float32).sum, weight.nbytes, PROBE_SECONDS / 4)]
    if native.available():
        row, scale = torch.zeros(1, _COLUMNS).bfloat16(), torch.ones(rows).bfloat16()
        product = partial(native.dense_product, row, weight, scale)
        rates.append(speed_of(product, weight.nbytes, PROBE_SECONDS / 4))
    return max(rates)


def read_device(device: Device) -> float:
    """Bytes a second of reads of a device's own memory."""
    data = torch.ones(PROBE_BYTES, dtype=torch.float32, device=device.place)

    def read() -> None:
        for _ in range(_READS_PER_WAIT):
            data.sum()
        device.computed().wait()

    return speed_of(read, _READS_PER_WAIT * data.nbytes, PROBE_SECONDS / 2)


def machine_rates(disk: float, device: Device | None) -> dict[str, Rates]:
    """Measures the rates of this machine for an estimate, without a store: cpu, and cuda with a device.

    Args:
        disk: bytes per second of reads of the disk, as it was measured.
        device: None: there is no GPU.
    """
    day, seconds = date.today().isoformat(), PROBE_SECONDS / 4
    places: dict[str, Device | None] = {"cpu": None} | ({"cuda": device} if device else {})
    return {
        place: Rates(
            disk, copy_speed(each, PROBE_BYTES, seconds), read_device(each) if each else read_memory(), day
        )
        for place, each in places.items()
    }
