"""cache.plane_tier.PlaneTier, for every form, policy, memory and number of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread

import pytest
from device_double import DoubleDevice
from integrity import check_integrity
from toys import MERGED, SLICED, ToyForm, check, contents, expected, put, write

from edgemoe.cache.arena import in_ram
from edgemoe.cache.blocks import Arenas
from edgemoe.cache.device_arena import on_device, pinned
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.cache.policies import make_policy
from edgemoe.storage.base import Blocks, ExpertKey

A, B, C = ExpertKey(0, 1), ExpertKey(0, 2), ExpertKey(1, 0)


@dataclass(frozen=True)
class Case:
    form: ToyForm
    capacity: dict[str, int]
    device: str
    policy: str = "lru-planes"
    arenas: Callable[[], Arenas] = lambda: in_ram

    def tier(self) -> PlaneTier:
        policy, arenas = partial(make_policy, self.policy), self.arenas()
        return PlaneTier(
            self.form, self.capacity, policy, device=self.device, name=self.device, arenas=arenas
        )


CASES = {
    "merged, equal kinds": Case(MERGED, {"p4": 3, "p0": 3}, "cpu"),
    "merged, few p0": Case(MERGED, {"p4": 5, "p0": 2}, "cpu"),
    "sliced, equal kinds": Case(SLICED, {"base": 3, "d4": 3, "d8": 3}, "cuda:0"),
    "sliced, fewer above": Case(SLICED, {"base": 6, "d4": 3, "d8": 2}, "cpu"),
    "merged, whole experts": Case(MERGED, {"p4": 4, "p0": 2}, "cpu", "lru-experts"),
    "sliced, whole experts": Case(SLICED, {"base": 3, "d4": 3, "d8": 3}, "cpu", "lru-experts"),
    "sliced, by frequency": Case(SLICED, {"base": 4, "d4": 3, "d8": 2}, "cpu", "lfru"),
    "on a device": Case(
        SLICED, {"base": 5, "d4": 3, "d8": 2}, "cuda:0", "lfru", lambda: partial(on_device, DoubleDevice())
    ),
    "pinned": Case(
        SLICED,
        {"base": 3, "d4": 3, "d8": 3},
        "cpu",
        "lru-planes",
        lambda: partial(pinned, DoubleDevice(), "dram"),
    ),
}
"""Every case has blocks for two experts at level 8, and for a promotion next to them."""


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def form(case: Case) -> ToyForm:
    return case.form


@pytest.fixture
def tier(case: Case) -> Iterator[PlaneTier]:
    tier = case.tier()
    yield tier
    check_integrity(tier)


@pytest.mark.parametrize("level", [2, 4, 8])
def test_a_published_expert_is_a_hit(tier: PlaneTier, form: ToyForm, level: int) -> None:
    """An expert is resident from publish on, at its level and with its bytes, and no other expert is."""
    assert tier.acquire(A, 2) is None
    put(tier, form, A, level)
    check(tier, form, {A: level})
    assert (tier.level_of(A), tier.level_of(B)) == (level, 0)


def test_a_reserved_expert_is_a_miss(tier: PlaneTier, form: ToyForm) -> None:
    """Before publish an expert is not resident and cannot be leased."""
    reservation = tier.reserve(A, 4)
    assert reservation is not None
    assert (tier.acquire(A, 2), tier.level_of(A), tier.resident()) == (None, 0, {})
    tier.abandon(reservation)
    check(tier, form, {})


@pytest.mark.parametrize(("level", "hit"), [(2, True), (4, True), (8, False)])
def test_a_higher_level_serves_a_lower(tier: PlaneTier, form: ToyForm, level: int, hit: bool) -> None:
    """An expert at level 4 is a hit, at 4, for levels up to 4, and a miss above."""
    put(tier, form, A, 4)
    lease = tier.acquire(A, level)
    assert (lease is not None) == hit
    if lease:
        assert lease.level == 4
        tier.release(lease)


def test_a_lease_names_its_device(tier: PlaneTier, form: ToyForm, case: Case) -> None:
    """A lease names the memory that its blocks lie in."""
    put(tier, form, A, 2)
    lease = tier.acquire(A, 2)
    assert lease is not None
    assert lease.device == case.device
    tier.release(lease)


@pytest.mark.parametrize(("low", "high"), [(2, 4), (2, 8), (4, 8)])
def test_promotion_reserves_only_what_is_missing(tier: PlaneTier, form: ToyForm, low: int, high: int) -> None:
    """A promotion reserves exactly the kinds that ResidentForm.rewritten names."""
    put(tier, form, A, low)
    reservation = tier.reserve(A, high)
    assert reservation is not None
    assert reservation.lease is not None
    assert reservation.lease.level == low
    assert set(reservation.into) == set(form.rewritten(low, high))
    for kind, block in reservation.into.items():
        write(block, form.content(A, kind, high))
    tier.release(tier.publish(reservation))
    check(tier, form, {A: high})


def test_an_abandoned_promotion_changes_nothing(tier: PlaneTier, form: ToyForm) -> None:
    """An expert resident before a reservation stays after abandon, with any bytes in the new blocks."""
    put(tier, form, A, 2)
    reservation = tier.reserve(A, 8)
    assert reservation is not None
    for block in reservation.into.values():
        write(block, b"\xff" * len(block))
    tier.abandon(reservation)
    check(tier, form, {A: 2})


def test_leased_bytes_never_change(tier: PlaneTier, form: ToyForm) -> None:
    """Promotion, demotion, eviction and refilling of a tier do not change the bytes under a lease."""
    put(tier, form, A, 2)
    lease = tier.acquire(A, 2)
    assert lease is not None
    before = contents(lease.blocks)
    put(tier, form, A, 4)
    assert (lease.level, contents(lease.blocks)) == (2, before)
    tier.drop(A, 2)
    tier.drop(A)
    for expert in range(20):
        put(tier, form, ExpertKey(5, expert), (2, 4, 8)[expert % 3])
        assert contents(lease.blocks) == before == expected(form, A, 2)
        check_integrity(tier)
    tier.release(lease)


def test_drop_evicts(tier: PlaneTier, form: ToyForm) -> None:
    """A dropped expert is a miss; a second drop has no effect."""
    put(tier, form, A, 8)
    put(tier, form, B, 2)
    tier.drop(A)
    tier.drop(A)
    check(tier, form, {B: 2})


@pytest.mark.parametrize(("before", "level"), [(8, 4), (8, 2), (4, 2), (2, 4), (4, 4)])
def test_drop_demotes_by_whole_blocks(tier: PlaneTier, form: ToyForm, before: int, level: int) -> None:
    """A merged p4 has other bytes at level 2 than at 4, so that a drop of its expert stops at 4."""
    put(tier, form, A, before)
    tier.drop(A, level)
    lowest = max(level, 4) if form is MERGED else level
    check(tier, form, {A: min(before, lowest)})


def test_a_promotion_survives_a_drop(tier: PlaneTier, form: ToyForm) -> None:
    """An expert that is dropped during its promotion is whole after publish."""
    put(tier, form, A, 4)
    reservation = tier.reserve(A, 8)
    assert reservation is not None
    tier.drop(A)
    assert tier.level_of(A) == 0
    for kind, block in reservation.into.items():
        write(block, form.content(A, kind, 8))
    tier.release(tier.publish(reservation))
    check(tier, form, {A: 8})


def test_a_tier_of_leased_experts_refuses_a_reservation(tier: PlaneTier, form: ToyForm, case: Case) -> None:
    """While every expert is leased reserve returns None and changes nothing."""
    lowest = form.kinds[0].name
    keys = [ExpertKey(0, e) for e in range(case.capacity[lowest])]
    leases = []
    for key in keys:
        put(tier, form, key, 2)
        lease = tier.acquire(key, 2)
        assert lease is not None
        leases.append(lease)
    for level in (2, 4, 8):
        assert tier.reserve(C, level) is None
    check(tier, form, dict.fromkeys(keys, 2))
    assert all(contents(lease.blocks) == expected(form, lease.key, 2) for lease in leases)
    tier.release(leases.pop(1))
    put(tier, form, C, 2)
    check(tier, form, {key: 2 for key in [*keys, C] if key != keys[1]})
    for lease in leases:
        tier.release(lease)


def test_a_victim_keeps_its_bytes_until_its_blocks_are_written(tier: PlaneTier, form: ToyForm) -> None:
    """A reservation lists every victim at the level and with the bytes that it had before."""
    levels = {}
    victims = []
    for expert in range(12):
        key, level = ExpertKey(2, expert), (8, 4, 2)[expert % 3]
        reservation = tier.reserve(key, level)
        assert reservation is not None
        for victim in reservation.victims:
            assert victim.level == levels[victim.key]
            assert contents(victim.blocks) == expected(form, victim.key, victim.level)
            victims.append(victim.key)
        for kind, block in reservation.into.items():
            write(block, form.content(key, kind, level))
        tier.release(tier.publish(reservation))
        levels[key] = level
        levels = {k: tier.level_of(k) for k in levels}
        check(tier, form, {k: level for k, level in levels.items() if level})
    assert victims


def test_leases_and_reservations_end_once(tier: PlaneTier, form: ToyForm) -> None:
    """A second release, publish or abandon is an error that changes nothing."""
    reservation = tier.reserve(A, 2)
    assert reservation is not None
    write(reservation.into[form.kinds[0].name], form.content(A, form.kinds[0].name, 2))
    lease = tier.publish(reservation)
    for end in (tier.publish, tier.abandon):
        with pytest.raises(ValueError, match="a reservation that has not ended"):
            end(reservation)
    tier.release(lease)
    with pytest.raises(ValueError, match="a lease that has not ended"):
        tier.release(lease)
    check(tier, form, {A: 2})


def test_another_tiers_reservation_is_refused(tier: PlaneTier, case: Case) -> None:
    """A tier ends only its own reservations, though both tiers have one of the same key."""
    other = case.tier()
    mine, theirs = tier.reserve(A, 2), other.reserve(A, 2)
    assert mine is not None
    assert theirs is not None
    with pytest.raises(ValueError, match="a reservation that has not ended"):
        tier.publish(theirs)
    tier.abandon(mine)
    other.abandon(theirs)


@pytest.mark.parametrize("level", [0, 2, 3, 4, 16])
def test_a_reservation_raises_the_level(tier: PlaneTier, form: ToyForm, level: int) -> None:
    """A level that is resident already, or is no level, is an error."""
    put(tier, form, A, 4)
    with pytest.raises(ValueError, match="expected a level above"):
        tier.reserve(A, level)
    check(tier, form, {A: 4})


def test_an_expert_is_reserved_once_at_a_time(tier: PlaneTier) -> None:
    """A second reservation of an expert is an error while the first has not ended."""
    reservation = tier.reserve(A, 2)
    assert reservation is not None
    with pytest.raises(ValueError, match="and reserved"):
        tier.reserve(A, 4)
    tier.abandon(reservation)


@pytest.mark.e2e
def test_threads_share_a_tier(tier: PlaneTier, form: ToyForm) -> None:
    """Readers lease the bytes of their expert alone, while a writer replaces every expert."""
    keys = [ExpertKey(0, e) for e in range(8)]
    stop, seen, wrong = Event(), Event(), []

    def look() -> None:
        while not stop.is_set():
            for key in keys:
                lease = tier.acquire(key, 2)
                if lease:
                    seen.set()
                    if contents(lease.blocks) != expected(form, key, lease.level):
                        wrong.append(lease)
                    tier.release(lease)

    readers = [Thread(target=look) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for turn in range(150):
            key, level = keys[turn % len(keys)], (2, 4, 8)[turn % 3]
            reservation = tier.reserve(key, level) if tier.level_of(key) < level else None
            if reservation:
                for kind, block in reservation.into.items():
                    write(block, form.content(key, kind, level))
                tier.release(tier.publish(reservation))
        assert seen.wait(timeout=30)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not wrong


def test_several_experts_are_acquired_at_once(tier: PlaneTier, form: ToyForm) -> None:
    """A hit is leased at its resident level, in the order of keys; partial and missing experts are listed."""
    put(tier, form, B, 4)
    put(tier, form, A, 2)
    acquired = tier.acquire_all({C: 2, B: 2, A: 4})
    assert [(lease.key, lease.level) for lease in acquired.hits] == [(B, 4)]
    assert contents(acquired.hits[0].blocks) == expected(form, B, 4)
    assert (acquired.partial, acquired.missing) == ([A], [C])
    tier.release(*acquired.hits)
    both = tier.acquire_all({B: 4, A: 2}).hits
    assert [lease.key for lease in both] == [A, B]
    tier.release(*both)
    check(tier, form, {A: 2, B: 4})


def test_observers_mirror_the_tier(tier: PlaneTier, form: ToyForm) -> None:
    """Arrivals, promotions, demotions, evictions and drops reach both observers, the later one from its start on."""

    def observed() -> dict[ExpertKey, tuple[int, Blocks]]:
        mirror: dict[ExpertKey, tuple[int, Blocks]] = {}
        tier.observe(
            lambda key, level, blocks: mirror.update({key: (level, blocks)}) if level else mirror.pop(key)
        )
        return mirror

    mirrors = [observed()]
    for turn in range(24):
        key, level = ExpertKey(0, turn * 5 % 7), (2, 8, 4)[turn % 3]
        if tier.level_of(key) < level:
            put(tier, form, key, level)
        elif turn % 2:
            tier.drop(key, 2)
        if turn % 5 == 0:
            tier.drop(next(iter(tier.resident())))
        if turn == 7:
            mirrors.append(observed())
        for mirror in mirrors:
            assert {key: level for key, (level, _) in mirror.items()} == tier.resident()
            assert all(contents(blocks) == expected(form, k, at) for k, (at, blocks) in mirror.items())


def test_mark_used_counts_as_a_lease_would(case: Case, form: ToyForm) -> None:
    """Of two tiers with one history, one uses experts by leases, the other by mark_used: both evict alike."""
    leased, marked = case.tier(), case.tier()
    for tier in (leased, marked):
        for expert in range(3):
            put(tier, form, ExpertKey(0, expert), 2)
    for key in (ExpertKey(0, 1), ExpertKey(0, 0), ExpertKey(0, 0)):
        leased.release(*leased.acquire_all({key: 2}).hits)
        marked.mark_used([key])
    for expert in range(8):
        for tier in (leased, marked):
            put(tier, form, ExpertKey(1, expert), (2, 8)[expert % 2])
        assert leased.resident() == marked.resident()
