"""A fetcher over a fast tier on a device, and a random load under which all of its blocks are reused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from device_double import poisoned
from integrity import check_integrity
from one_step import OneStepFetcher
from toys import SLICED, ToyForm, ToyReader, WholeToy, contents, expected

from edgemoe.cache.base import EvictionPolicy
from edgemoe.cache.blocks import FreeList
from edgemoe.cache.device_arena import pinned
from edgemoe.cache.lru import LRU
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.prefetch.device_path import DevicePath, Staging
from edgemoe.storage.base import ExpertKey

LAYERS, EXPERTS = 2, 6
MOST_READS = 2_000


class EndlessReader(ToyReader):
    """Fails after MOST_READS reads: a request reads the same experts again and again."""

    def read(self, key, first, last, into):
        assert len(self.reads) < MOST_READS, "read for ever"
        return super().read(key, first, last, into)


class DeviceRig:
    """A fetcher whose fast tier lies on a device.

    Args:
        device: a double, or another device with a method `launch`.
        vram, dram: experts at level 8 that each tier has blocks for; dram None: there is no slow tier.
        arenas: the fast tier's memory.
        form, policy: form and eviction policy of both tiers.
    """

    def __init__(
        self,
        device: Any,
        vram: int,
        dram: int | None = None,
        *,
        arenas: Callable[..., dict[str, FreeList]] = poisoned,
        form: ToyForm | WholeToy = SLICED,
        policy: type[EvictionPolicy] = LRU,
    ) -> None:
        self.device, self.reader, self.form, self.policy = device, EndlessReader(), form, policy
        self.vram = self._tier("vram", vram, partial(arenas, device), device.name)
        self.dram = self._tier("dram", dram, partial(pinned, device, "dram"), "cpu") if dram else None
        self.staging = Staging(device, SLICED.kinds, 3)
        self.path = DevicePath(self.vram, self.dram, form, device, self.staging)
        self.fetcher = OneStepFetcher(self.vram, self.dram, form, self.reader, path=self.path, workers=2)
        self.fetcher.configure("full")

    def _tier(self, name: str, experts: int, arenas, place: str) -> PlaneTier:
        capacity = {kind.name: experts for kind in SLICED.kinds}
        return PlaneTier(self.form, capacity, self.policy, device=place, name=name, arenas=arenas)

    def fetch(self, levels: dict[ExpertKey, int], predicted: dict[ExpertKey, int] | None = None) -> None:
        """Requests `levels` and predicts; a kernel on every lease must read the expert's own bytes."""
        came = []
        with self.fetcher.request(levels) as request:
            self.fetcher.read_ahead(predicted or {})
            for leases in request:
                for lease in leases:
                    assert lease.level >= levels[lease.key]
                    read = contents if lease.device == "cpu" else self.device.launch
                    assert read(lease.blocks) == expected(SLICED, lease.key, lease.level)
                    came.append(lease.key)
        assert sorted(came) == sorted(levels)

    def close(self) -> None:
        """Closes the fetcher and the tiers; asserts that nothing is lost, overwritten, pinned or under way."""
        self.fetcher.close()
        self.device.end()
        for tier in (self.vram, self.dram):
            if tier:
                check_integrity(tier)
                assert not tier.residents.leases
                assert not tier.residents.pending
                tier.close()
        assert self.device.pinned == {}


def turmoil(rig: DeviceRig, seed: int, requests: int = 40) -> None:
    """Requests random experts at random levels, predicts others, and empties the tiers now and then."""
    chance = Random(seed)

    def some(layer: int, limit: int) -> dict[ExpertKey, int]:
        experts = chance.sample(range(EXPERTS), chance.randint(1, limit))
        return {ExpertKey(layer, expert): chance.choice((2, 4, 8)) for expert in experts}

    for turn in range(requests):
        layer = turn % LAYERS
        rig.fetch(some(layer, 4), some(1 - layer, 3))
        if chance.random() < 0.1:
            rig.fetcher.release_pins()
            for tier in (rig.vram, rig.dram):
                for key in tier.resident() if tier else ():
                    tier.drop(key)


def crowd(tier: PlaneTier, level: int) -> int:
    """Overwrites every block of a tier in RAM that can be had, and frees it; returns the number of experts."""
    taken = []
    while reservation := tier.reserve(ExpertKey(9, len(taken)), level):
        taken.append(reservation)
        for block in reservation.into.values():
            block[:] = b"\xee" * len(block)
    for reservation in taken:
        tier.abandon(reservation)
    return len(taken)
