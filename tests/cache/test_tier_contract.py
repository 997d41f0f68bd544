"""What every Tier promises, whatever its blocks and however many it has of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread

import pytest
from device_double import DoubleDevice
from toys import MERGED, SLICED, ToyForm, check, contents, expected, put, write

from cache.arena import in_ram
from cache.base import Tier
from cache.device_arena import OnDevice, Pinned
from cache.free_list import Arenas
from cache.plane_tier import PlaneTier
from cache.policies import make_policy
from storage.base import ExpertKey

A, B, C = ExpertKey(0, 1), ExpertKey(0, 2), ExpertKey(1, 0)


@dataclass(frozen=True)
class Case:
    form: ToyForm
    capacity: dict[str, int]
    device: str
    policy: str = "lru-planes"
    arenas: Callable[[], Arenas] = lambda: in_ram

    def tier(self) -> Tier:
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
        SLICED, {"base": 5, "d4": 3, "d8": 2}, "cuda:0", "lfru", lambda: OnDevice(DoubleDevice())
    ),
    "pinned": Case(
        SLICED, {"base": 3, "d4": 3, "d8": 3}, "cpu", "lru-planes", lambda: Pinned(DoubleDevice(), "dram")
    ),
}
"""Every case has room for two experts at level 8, and for a promotion beside them."""


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def form(case: Case) -> ToyForm:
    return case.form


@pytest.fixture
def tier(case: Case) -> Iterator[Tier]:
    tier = case.tier()
    yield tier
    tier.check_integrity()


@pytest.mark.parametrize("level", [2, 4, 8])
def test_what_is_published_is_found(tier: Tier, form: ToyForm, level: int) -> None:
    """An expert is resident from publish on, at its level, with its bytes; nothing else is."""
    assert tier.acquire(A, 2) is None
    put(tier, form, A, level)
    check(tier, form, {A: level})
    assert (tier.level_of(A), tier.level_of(B)) == (level, 0)


def test_nothing_is_seen_before_publish(tier: Tier, form: ToyForm) -> None:
    """While an expert is on its way in, nobody gets a lease on it."""
    reservation = tier.reserve(A, 4)
    assert reservation is not None
    assert (tier.acquire(A, 2), tier.level_of(A), tier.resident()) == (None, 0, {})
    tier.abandon(reservation)
    check(tier, form, {})


@pytest.mark.parametrize(("asked", "hit"), [(2, True), (4, True), (8, False)])
def test_a_higher_level_serves_a_lower(tier: Tier, form: ToyForm, asked: int, hit: bool) -> None:
    """Asked level <= resident level is a hit on what is resident; asked above is a miss."""
    put(tier, form, A, 4)
    lease = tier.acquire(A, asked)
    assert (lease is not None) == hit
    if lease:
        assert lease.level == 4
        tier.release(lease)


def test_a_lease_says_where_its_blocks_lie(tier: Tier, form: ToyForm, case: Case) -> None:
    """Handles carry their device."""
    put(tier, form, A, 2)
    lease = tier.acquire(A, 2)
    assert lease is not None
    assert lease.device == case.device
    tier.release(lease)


@pytest.mark.parametrize(("low", "high"), [(2, 4), (2, 8), (4, 8)])
def test_promotion_reserves_only_what_is_missing(tier: Tier, form: ToyForm, low: int, high: int) -> None:
    """A promotion's new blocks are exactly those its form says; the rest stays where it is."""
    put(tier, form, A, low)
    reservation = tier.reserve(A, high)
    assert reservation is not None
    assert reservation.held is not None
    assert reservation.held.level == low
    assert set(reservation.into) == set(form.rewritten(low, high))
    for kind, block in reservation.into.items():
        write(block, form.content(A, kind, high))
    tier.release(tier.publish(reservation))
    check(tier, form, {A: high})


def test_an_abandoned_promotion_leaves_the_old(tier: Tier, form: ToyForm) -> None:
    """What was resident before a reservation is so after it is abandoned, whatever was written."""
    put(tier, form, A, 2)
    reservation = tier.reserve(A, 8)
    assert reservation is not None
    for block in reservation.into.values():
        write(block, b"\xff" * len(block))
    tier.abandon(reservation)
    check(tier, form, {A: 2})


def test_a_lease_outlives_every_change(tier: Tier, form: ToyForm) -> None:
    """Promotion, demotion, eviction and refilling of a tier leave a lease's bytes as they were."""
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
        tier.check_integrity()
    tier.release(lease)


def test_drop_forgets(tier: Tier, form: ToyForm) -> None:
    """A dropped expert is a miss, its blocks are free; dropping what is not there does nothing."""
    put(tier, form, A, 8)
    put(tier, form, B, 2)
    tier.drop(A)
    tier.drop(A)
    check(tier, form, {B: 2})


@pytest.mark.parametrize(("held", "level"), [(8, 4), (8, 2), (4, 2), (2, 4), (4, 4)])
def test_drop_demotes_as_far_as_blocks_can_be_given_up(
    tier: Tier, form: ToyForm, held: int, level: int
) -> None:
    """Where p4 is merged, level 2's bytes are not level 4's: 4 is as low as blocks alone get."""
    put(tier, form, A, held)
    tier.drop(A, level)
    lowest = max(level, 4) if form is MERGED else level
    check(tier, form, {A: min(held, lowest)})


def test_a_promotion_survives_a_drop(tier: Tier, form: ToyForm) -> None:
    """An expert dropped while it is being promoted is complete when the promotion is published."""
    put(tier, form, A, 4)
    reservation = tier.reserve(A, 8)
    assert reservation is not None
    tier.drop(A)
    assert tier.level_of(A) == 0
    for kind, block in reservation.into.items():
        write(block, form.content(A, kind, 8))
    tier.release(tier.publish(reservation))
    check(tier, form, {A: 8})


def test_a_full_tier_of_pinned_experts_refuses(tier: Tier, form: ToyForm, case: Case) -> None:
    """With everything leased nothing is evicted: reserve says None and changes nothing until a release."""
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


def test_a_victim_keeps_its_bytes_until_it_is_overwritten(tier: Tier, form: ToyForm) -> None:
    """Whoever was evicted is listed with the level and all the bytes it had."""
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


def test_everything_ends_once(tier: Tier, form: ToyForm) -> None:
    """A second release, publish or abandon, and another tier's lease, are errors that change nothing."""
    reservation = tier.reserve(A, 2)
    assert reservation is not None
    write(reservation.into[form.kinds[0].name], form.content(A, form.kinds[0].name, 2))
    lease = tier.publish(reservation)
    for end in (tier.publish, tier.abandon):
        with pytest.raises(ValueError, match="no such reservation"):
            end(reservation)
    tier.release(lease)
    with pytest.raises(ValueError, match="no such lease"):
        tier.release(lease)
    check(tier, form, {A: 2})


def test_another_tiers_reservation_is_refused(tier: Tier, case: Case) -> None:
    """A reservation can only be ended by the tier that made it, even if both have one of the same key."""
    other = case.tier()
    mine, theirs = tier.reserve(A, 2), other.reserve(A, 2)
    assert mine is not None
    assert theirs is not None
    with pytest.raises(ValueError, match="no such reservation"):
        tier.publish(theirs)
    tier.abandon(mine)
    other.abandon(theirs)


@pytest.mark.parametrize("level", [0, 2, 3, 4, 16])
def test_reservations_that_make_no_sense_are_refused(tier: Tier, form: ToyForm, level: int) -> None:
    """A level that is resident already, or is none, is an error and not a promotion."""
    put(tier, form, A, 4)
    with pytest.raises(ValueError, match="wanted"):
        tier.reserve(A, level)
    check(tier, form, {A: 4})


def test_an_expert_is_reserved_once_at_a_time(tier: Tier) -> None:
    """Two transfers of one expert at once are a mistake of the caller."""
    reservation = tier.reserve(A, 2)
    assert reservation is not None
    with pytest.raises(ValueError, match="reserved"):
        tier.reserve(A, 4)
    tier.abandon(reservation)


def test_threads_share_a_tier(tier: Tier, form: ToyForm) -> None:
    """Readers never see bytes that are not the asked expert's, while a writer turns the tier over."""
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
