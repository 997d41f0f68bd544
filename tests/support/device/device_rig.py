"""A fetcher over a fast tier on a device, and layers that leave nothing in it where it was."""

from __future__ import annotations

from random import Random
from typing import Any

from device_double import Poisoned
from toys import SLICED, ToyReader, contents, expected

from cache.base import Tier
from cache.device_arena import OnDevice, Pinned
from cache.lru import LRU
from cache.plane_tier import PlaneTier
from prefetch.device_path import StagedRoute, Staging
from prefetch.fetcher import Fetcher
from storage.base import ExpertKey

LAYERS, EXPERTS = 2, 6
MOST_READS = 2_000


class EndlessReader(ToyReader):
    """Fails once so much was read that somebody must be asking for the same again and again."""

    def read(self, key, first, last, into):
        assert len(self.reads) < MOST_READS, "read for ever"
        return super().read(key, first, last, into)


class DeviceRig:
    """A fetcher whose fast tier lies on a device; room for so many experts at level 8 in each tier.

    `device` is a double, or another device with its `launch`.
    """

    def __init__(
        self,
        device: Any,
        vram: int,
        dram: int | None = None,
        *,
        arenas: type[OnDevice] = Poisoned,
    ) -> None:
        self.device, self.reader = device, EndlessReader()
        self.vram = self._tier("vram", vram, arenas(device), device.name)
        self.dram = self._tier("dram", dram, Pinned(device, "dram"), "cpu") if dram else None
        self.staging = Staging(device, SLICED.kinds, 3)
        self.route = StagedRoute(self.vram, self.dram, SLICED, device, self.staging)
        self.fetcher = Fetcher(
            self.vram, self.dram, SLICED, self.reader, route=self.route, workers=2, speculate="full"
        )

    def _tier(self, name: str, experts: int, arenas, place: str) -> PlaneTier:
        capacity = {kind.name: experts for kind in SLICED.kinds}
        return PlaneTier(SLICED, capacity, LRU, device=place, name=name, arenas=arenas)

    def fetch(self, wanted: dict[ExpertKey, int], predicted: dict[ExpertKey, int] | None = None) -> None:
        """Streams `wanted`, and launches a kernel on every expert that must see the expert's own bytes."""
        came = []
        with self.fetcher.stream(wanted) as leases:
            self.fetcher.speculate(predicted or {})
            for lease in leases:
                for one in [lease, *leases.ready()]:
                    assert one.level >= wanted[one.key]
                    read = contents if one.device == "cpu" else self.device.launch
                    assert read(one.blocks) == expected(SLICED, one.key, one.level)
                    came.append(one.key)
        assert sorted(came) == sorted(wanted)

    def close(self) -> None:
        """Ends it, and asserts that nothing was lost, overwritten, left pinned or left under way."""
        self.fetcher.close()
        self.device.end()
        for tier in (self.vram, self.dram):
            if tier:
                tier.check_integrity()
                assert not tier._leases
                assert not tier._pending
                tier.close()
        assert self.device.pinned == {}


def turmoil(rig: DeviceRig, seed: int, passes: int = 40) -> None:
    """Layers that want experts at all levels, guess at others, and now and then lose everything."""
    chance = Random(seed)

    def some(layer: int, most: int) -> dict[ExpertKey, int]:
        experts = chance.sample(range(EXPERTS), chance.randint(1, most))
        return {ExpertKey(layer, expert): chance.choice((2, 4, 8)) for expert in experts}

    for turn in range(passes):
        layer = turn % LAYERS
        rig.fetch(some(layer, 4), some(1 - layer, 3))
        if chance.random() < 0.1:
            rig.fetcher.settle()
            for tier in (rig.vram, rig.dram):
                for key in tier.resident() if tier else ():
                    tier.drop(key)


def crowd(tier: Tier, level: int) -> int:
    """Fills a tier in RAM with others, as long as there is room, and gives it back; returns how many there were."""
    taken = []
    while reservation := tier.reserve(ExpertKey(9, len(taken)), level):
        taken.append(reservation)
        for block in reservation.into.values():
            block[:] = b"\xee" * len(block)
    for reservation in taken:
        tier.abandon(reservation)
    return len(taken)
