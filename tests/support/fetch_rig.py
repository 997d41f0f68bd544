"""A fetcher over toy tiers and a toy disk, for the tests of prefetch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
from one_step import OneStepFetcher
from toys import ToyForm, ToyReader, WholeToy, check, contents, expected

from edgemoe.cache.base import EvictionPolicy, Lease
from edgemoe.cache.lru import LRU
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.errors import ChecksumMismatch
from edgemoe.prefetch.base import Request
from edgemoe.prefetch.lookahead import LookaheadGate
from edgemoe.storage.base import ExpertKey

WAIT = 30
"""Seconds after which a test fails that would hang otherwise."""


def broken(key: ExpertKey) -> ChecksumMismatch:
    """The error of a read that finds other bytes than were written."""
    return ChecksumMismatch(f"the bytes of expert {key.expert}", "other bytes", "convert the model again")


def after(patch: pytest.MonkeyPatch, tier: object, method: str, then: Callable[[], object]) -> None:
    """Calls `then` at the end of every call of a method of a tier, or of a part of it."""
    original = getattr(tier, method)

    def both(*arguments: object) -> object:
        result = original(*arguments)
        then()
        return result

    patch.setattr(tier, method, both)


class Arrivals:
    """One lease after another of a request, for tests whose subject is the order and not the lists."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._ready: list[Lease] = []

    def __iter__(self) -> Arrivals:
        return self

    def __next__(self) -> Lease:
        """The next lease of the current list, or the first one of the next list."""
        if not self._ready:
            self._ready = list(next(self._request))
        return self._ready.pop(0)


class CountingReader(ToyReader):
    """A toy disk that adds up the bytes that were read."""

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
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """A fetcher over tiers with blocks for a number of experts at level 8.

    Args:
        form: the form of both tiers.
        vram: experts that the fast tier has blocks for, or blocks of each kind, by its name.
        dram: experts that the slow tier has blocks for; None: there is no slow tier.
        workers, gate: see Fetcher.
        look_ahead: see Fetcher.configure.
        policy: the eviction policy of both tiers.
    """

    def __init__(
        self,
        form: ToyForm | WholeToy,
        vram: int | Mapping[str, int],
        dram: int | None = None,
        workers: int = 2,
        look_ahead: str = "off",
        gate: LookaheadGate | None = None,
        policy: type[EvictionPolicy] = LRU,
    ) -> None:
        self.form, self.reader, self.clock, self.policy = form, CountingReader(), Clock(), policy
        self.vram = self._tier("vram", vram)
        self.dram = self._tier("dram", dram) if dram is not None else None
        self.fetcher = OneStepFetcher(
            self.vram,
            self.dram,
            form,
            self.reader,
            workers=workers,
            gate=gate,
            clock=self.clock,
        )
        self.fetcher.configure(look_ahead)

    def _tier(self, name: str, experts: int | Mapping[str, int]) -> PlaneTier:
        by_kind = isinstance(experts, Mapping)
        capacity = experts if by_kind else {kind.name: experts for kind in self.form.kinds}
        return PlaneTier(self.form, capacity, self.policy, device="cpu", name=name)

    def fetch(self, levels: Mapping[ExpertKey, int], *, scan: bool = False) -> list[ExpertKey]:
        """Requests `levels`, checks every lease's level and bytes, and returns the order in which they came."""
        order = []
        with self.fetcher.request(levels, scan=scan) as request:
            for leases in request:
                for lease in leases:
                    assert lease.level >= levels[lease.key]
                    assert contents(lease.blocks) == expected(self.form, lease.key, lease.level)
                    order.append(lease.key)
        assert sorted(order) == sorted(levels)
        self.whole()
        return order

    def predict(
        self, predicted: Mapping[ExpertKey, int], during: Mapping[ExpertKey, int] | None = None
    ) -> None:
        """Requests `during`, by default nothing, and predicts before its first lease."""
        with self.fetcher.request(during or {}) as request:
            self.fetcher.read_ahead(predicted)
            for leases in request:
                for lease in leases:
                    assert contents(lease.blocks) == expected(self.form, lease.key, lease.level)

    def landed(self, *keys: ExpertKey) -> None:
        """Waits until the workers have ended the transfers under way, and the moves, of some experts."""
        transfers = self.fetcher.transfers
        for key in keys:
            for transfer in (transfers.under_way.get(key), transfers.moving.get(key)):
                if transfer:
                    transfers.await_done((transfer,))

    def whole(self) -> None:
        """Asserts that no block is lost, no lease is left, no expert is in both tiers, and all bytes are right."""
        residents = self.vram.resident()
        check(self.vram, self.form, residents)
        assert not self.vram.residents.leases
        assert not self.vram.residents.pending
        if self.dram:
            check(self.dram, self.form, self.dram.resident())
            assert not residents.keys() & self.dram.resident().keys()
            assert not self.dram.residents.leases
            assert not self.dram.residents.pending


def rigs() -> Iterator[type[Rig]]:
    """A fixture's Rig class, whose fetchers are closed after the test and whose threads have ended then."""
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
    names = [thread.name for thread in threading.enumerate()]
    assert [name for name in names if name.startswith(("transfer-", "move-"))] == []
