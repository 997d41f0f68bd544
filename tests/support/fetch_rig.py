"""A fetcher over toy tiers and a toy disk, for the tests of prefetch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
from toys import ToyForm, ToyReader, check, contents, expected

from cache.lru import LRU
from cache.plane_tier import PlaneTier
from prefetch.fetcher import Fetcher
from prefetch.lookahead_gate import Judge
from storage.base import ExpertKey
from storage.errors import ChecksumMismatch

WAIT = 30
"""Seconds after which a test that would hang fails instead."""


def broken(key: ExpertKey) -> ChecksumMismatch:
    return ChecksumMismatch(f"expert {key.expert} was wanted", "other bytes", "Convert the model again")


def after(patch: pytest.MonkeyPatch, tier: PlaneTier, method: str, then: Callable[[], object]) -> None:
    """Has the tier call `then` at the end of every call of one of its methods."""
    original = getattr(tier, method)

    def both(argument: object) -> object:
        result = original(argument)
        then()
        return result

    patch.setattr(tier, method, both)


class CountingReader(ToyReader):
    """A toy disk that knows how many bytes were read from it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._lock = threading.Lock()

    def read(self, key, first, last, into):
        read = super().read(key, first, last, into)
        with self._lock:
            self.bytes += read
        return read


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A fetcher over tiers with room for so many experts at level 8; no DRAM tier where that is None."""

    def __init__(
        self,
        form: ToyForm,
        vram: int,
        dram: int | None = None,
        workers: int = 2,
        speculate: str = "off",
        judge: Judge | None = None,
        roomy: bool = False,
    ) -> None:
        self.form = form
        self.reader = CountingReader()
        self.clock = Clock()
        self.vram = self._tier("vram", vram)
        self.dram = self._tier("dram", dram) if dram is not None else None
        self.fetcher = Fetcher(
            self.vram,
            self.dram,
            form,
            self.reader,
            workers=workers,
            speculate=speculate,
            judge=judge,
            roomy=roomy,
            clock=self.clock,
        )

    def _tier(self, name: str, experts: int) -> PlaneTier:
        capacity = {kind.name: experts for kind in self.form.kinds}
        return PlaneTier(self.form, capacity, LRU, device="cpu", name=name)

    def fetch(self, wanted: Mapping[ExpertKey, int]) -> list[ExpertKey]:
        """Streams `wanted`, checks every lease's level and bytes, and returns the order they came in."""
        order = []
        with self.fetcher.stream(wanted) as leases:
            for lease in leases:
                assert lease.level >= wanted[lease.key]
                assert contents(lease.blocks) == expected(self.form, lease.key, lease.level)
                order.append(lease.key)
        assert sorted(order) == sorted(wanted)
        self.whole()
        return order

    def guess(
        self, predicted: Mapping[ExpertKey, int], during: Mapping[ExpertKey, int] | None = None
    ) -> None:
        """Streams `during`, nothing unless told, and predicts before its first lease."""
        with self.fetcher.stream(during or {}) as leases:
            self.fetcher.speculate(predicted)
            for lease in leases:
                assert contents(lease.blocks) == expected(self.form, lease.key, lease.level)

    def landed(self, *keys: ExpertKey) -> None:
        """Waits until the workers have done with what is under way of some experts."""
        traffic = self.fetcher._traffic
        for key in keys:
            if key in traffic.under_way:
                traffic.next_done((traffic.under_way[key],))

    def whole(self) -> None:
        """No block is lost, no lease is left, no expert is in both tiers, and all bytes are right."""
        residents = self.vram.resident()
        check(self.vram, self.form, residents)
        assert not self.vram._leases
        assert not self.vram._pending
        if self.dram:
            check(self.dram, self.form, self.dram.resident())
            assert not residents.keys() & self.dram.resident().keys()
            assert not self.dram._leases
            assert not self.dram._pending


def rigs() -> Iterator[type[Rig]]:
    """For a fixture: Rig, with every fetcher closed in the end and its threads seen to be gone."""
    made: list[Rig] = []

    class Closing(Rig):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            made.append(self)

    yield Closing
    for each in made:
        for gate in each.reader.gates.values():
            gate.set()
        each.fetcher.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("transfer-")] == []
