"""Bytes per second of each tier, measured in the same run as the times that they explain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from edgemoe.engine.engine import StoreModel
from edgemoe.machine.device import Device
from edgemoe.speed.tiers import copy_speed, read_speed, speed_of
from edgemoe.storage.store.reader import RecordReader

PROBE_SECONDS = 1.0
"""Seconds that each bandwidth is measured for."""

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
        wanted = [level for level in sorted(levels) if level]
        ssd = {level: read_speed(reader, store.manifest, level, PROBE_SECONDS) for level in wanted}
        direct = reader.direct
    dram = copy_speed(store.device, PROBE_BYTES, PROBE_SECONDS / 2)
    return Bandwidth(ssd, dram, _read_on(store.device) if store.device else _read(), direct)


def best(probes: Sequence[Bandwidth]) -> Bandwidth:
    """Returns the best of each tier over all probes: one slow second does not make a slow disk."""
    return Bandwidth(
        ssd={level: max(probe.ssd[level] for probe in probes) for level in probes[0].ssd},
        dram=max(probe.dram for probe in probes),
        vram=max(probe.vram for probe in probes),
        direct=all(probe.direct for probe in probes),
    )


def _read() -> float:
    data = torch.ones(PROBE_BYTES // 4, dtype=torch.float32)
    return speed_of(data.sum, data.nbytes, PROBE_SECONDS / 2)


def _read_on(device: Device) -> float:
    data = torch.ones(PROBE_BYTES, dtype=torch.float32, device=device.place)

    def read() -> None:
        for _ in range(_READS_PER_WAIT):
            data.sum()
        device.computed().wait()

    return speed_of(read, _READS_PER_WAIT * data.nbytes, PROBE_SECONDS / 2)
