"""Requests of experts with their compensators: right bytes, no deadlock in tiers of any size, and faults by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from random import Random

import numpy as np
import pytest
from fetch_rig import CountingReader, Rig, broken, rigs
from integrity import check_integrity
from toys import SLICED, contents, disk_bytes, expected, write

from edgemoe.cache.fixed_places import FixedPlaces
from edgemoe.cache.lru import LRU
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.errors import ChecksumMismatch, DoesNotFit
from edgemoe.prefetch.compensators.tier import CompensatorTier
from edgemoe.storage.base import BLOCK, BlockKind, Blocks, ExpertKey, Plane, ResidentForm, Source
from edgemoe.storage.compensators.reader import KIND, LEVEL

KEYS = [ExpertKey(0, e) for e in range(8)]
A, B, C, D = KEYS[:4]
SIZES = {key: (1 + e % 3) * BLOCK for e, key in enumerate(KEYS)}


class FactorForm(ResidentForm):
    """Blocks of an expert's own size, whose bytes are its number."""

    kinds = (BlockKind(KIND, 3 * BLOCK, LEVEL),)

    def rewritten(self, resident: int, level: int) -> tuple[str, ...]:
        return (KIND,) if level > resident == 0 else ()

    def fill(self, reader, key: ExpertKey, level: int, into: Blocks, source: Source | None) -> int:
        reader.read(key, Plane.BASE, Plane.BASE, [])
        write(into[KIND], bytes([1 + key.expert]) * SIZES[key])
        return SIZES[key]


class Factors:
    """A rig's tier of compensators with a budget of so many blocks of 4 KiB."""

    def __init__(self, rig: Rig, blocks: int) -> None:
        self.rig, self.reader, self.form = rig, CountingReader(), FactorForm()
        self.places = FixedPlaces(KIND, SIZES, blocks * BLOCK)
        self.tier = PlaneTier(self.form, {}, LRU, device="cpu", name="factors", places=self.places)
        rig.fetcher.use_compensators(CompensatorTier(self.tier, self.form, self.reader))

    def fetch(
        self, levels: Mapping[ExpertKey, int], compensated: Mapping[ExpertKey, int], *, scan: bool = False
    ) -> list[ExpertKey]:
        """Requests experts, and checks the bytes of each and of its compensator, while they are leased."""
        order = []
        with self.rig.fetcher.request(levels, scan=scan, compensated=compensated) as request:
            for leases in request:
                for lease in leases:
                    assert contents(lease.blocks) == expected(SLICED, lease.key, lease.level)
                    if compensated.get(lease.key) in (0, lease.level):
                        assert (np.asarray(self.places.view(lease.key)) == 1 + lease.key.expert).all()
                    order.append(lease.key)
        assert sorted(order) == sorted(levels)
        self.whole()
        return order

    def whole(self) -> None:
        """No lease, reservation or read is left, in any tier."""
        self.rig.whole()
        check_integrity(self.tier)
        assert not self.tier.residents.leases
        assert not self.tier.residents.pending
        assert not self.rig.fetcher._compensators.under_way


@pytest.fixture
def rig():
    yield from rigs()


@pytest.mark.e2e
@pytest.mark.parametrize("seed", range(30))
def test_any_requests_in_tiers_of_any_size(rig, seed):
    """Random levels, compensated experts, scans and sizes of both tiers, down to one expert and one compensator."""
    chance = Random(seed)
    r = rig(SLICED, chance.choice([1, 2, 3, 8]), chance.choice([None, 2]), workers=chance.choice([1, 3]))
    factors = Factors(r, chance.choice([3, 4, 6, 20]))
    for _ in range(40):
        wanted = {key: chance.choice([2, 4, 8]) for key in chance.sample(KEYS, chance.randint(1, 8))}
        compensated = {key: chance.choice([0, 2, 4]) for key in wanted if chance.random() < 0.6}
        factors.fetch(wanted, compensated, scan=chance.random() < 0.3)
    counts = r.fetcher.take_counts()
    read = sum(SIZES[key] for key in factors.reader.reads)
    assert counts.compensator_bytes == read > 0
    assert counts.ssd_bytes == read + r.reader.bytes


def test_what_is_in_memory_is_not_read_again(rig):
    """A hit reads nothing; the least recently used one of a full budget goes; a lease at another level reads none."""
    r = rig(SLICED, 8)
    factors = Factors(r, 3)
    factors.fetch({A: 2, B: 2}, {A: 0, B: 2})
    factors.fetch({A: 2, B: 2}, {A: 2, B: 0})
    assert factors.reader.reads == [A, B]
    factors.fetch({A: 2}, {A: 0})
    factors.fetch({D: 2}, {D: 0})
    assert factors.reader.reads == [A, B, D]
    assert factors.tier.resident() == {B: LEVEL, D: LEVEL} or factors.tier.resident() == {A: LEVEL, D: LEVEL}
    factors.fetch({C: 4}, {C: 2})
    assert C not in factors.reader.reads
    r.fetcher.take_counts()
    r.fetcher.request({}).__enter__().__exit__(None, None, None)
    assert r.fetcher.take_counts().compensator_bytes == 0


def test_a_plane_and_its_compensator_are_one_wait(rig):
    """An expert in memory waits for its compensator alone, and experts without one come before it."""
    r = rig(SLICED, 8)
    factors = Factors(r, 12)
    factors.fetch({A: 2, B: 2}, {})
    r.fetcher.take_counts()
    begun, end = factors.reader.delay(A)
    order = []
    with r.fetcher.request({A: 2, B: 2, C: 2}, compensated={A: 0}) as request:
        for leases in request:
            order += [lease.key for lease in leases]
            if len(order) == 2:
                assert begun.wait(30)
                end.set()
    assert order == [B, C, A]
    counts = r.fetcher.take_counts()
    assert counts.ssd_bytes == disk_bytes(0, 2) + SIZES[A]
    factors.whole()


def test_use_without_a_request_keeps_it(rig):
    """Experts that a kernel computed by itself count as uses of their compensators."""
    r = rig(SLICED, 8)
    factors = Factors(r, 4)
    factors.fetch({A: 2}, {A: 0})
    factors.fetch({C: 2}, {C: 0})
    r.fetcher.count_hits([[(A, 2)]], compensated=[A])
    factors.fetch({D: 2}, {D: 0})
    assert factors.tier.resident() == {A: LEVEL, D: LEVEL}


@pytest.mark.parametrize("resident", [True, False])
def test_a_failed_read_is_raised_and_leaves_everything_whole(rig, resident):
    """With the expert's own blocks in memory or on their way; the next request succeeds."""
    r = rig(SLICED, 3)
    factors = Factors(r, 6)
    if resident:
        factors.fetch({A: 2, B: 2}, {})
    factors.reader.errors[B] = broken(B)
    with pytest.raises(ChecksumMismatch, match="expert 1"):
        factors.fetch({A: 2, B: 2, C: 2}, {A: 0, B: 0, C: 0})
    factors.whole()
    factors.reader.errors.clear()
    factors.fetch({A: 2, B: 2, C: 2}, {A: 0, B: 0, C: 0})


def test_ctrl_c_while_a_compensator_is_read(rig):
    """The request ends with the read, and the tiers stay whole."""
    r = rig(SLICED, 3)
    factors = Factors(r, 6)
    factors.fetch({A: 2}, {})
    _, end = factors.reader.delay(A)
    with r.fetcher.request({A: 2}, compensated={A: 0}) as request:
        os.kill(os.getpid(), signal.SIGINT)
        end.set()
        with pytest.raises(KeyboardInterrupt):
            next(request)
    factors.whole()


def test_a_budget_below_one_compensator_is_refused(rig):
    r = rig(SLICED, 3)
    factors = Factors(r, 2)
    with pytest.raises(DoesNotFit, match="compensator of expert 2 of layer 0"):
        factors.fetch({A: 2, C: 2}, {A: 0, C: 0})
    factors.whole()
    factors.fetch({A: 2, C: 2}, {A: 0})


def test_compensators_without_a_tier_are_refused(rig):
    r = rig(SLICED, 3)
    with pytest.raises(ValueError, match="tier of compensators"):
        r.fetcher.request({A: 2}, compensated={A: 0})
