"""cache.pool: blocks of all kinds in one pool of bytes, and a tier on it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import SLICED, ToyForm, check, contents, expected, put, write

from edgemoe.cache.arena import in_ram
from edgemoe.cache.base import Victim
from edgemoe.cache.lru import LRU, PooledLRU
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.cache.pool import Pool
from edgemoe.storage.base import BLOCK, BlockKind, ExpertKey

A, B, C, D, E = (ExpertKey(0, e) for e in range(5))

KINDS = (BlockKind("base", 5 * BLOCK, 2), BlockKind("d4", 4 * BLOCK, 4))


def tier_of(experts: int, policy: type[LRU] = PooledLRU, form: ToyForm = SLICED) -> PlaneTier:
    """A tier with the bytes of so many experts at level 8: 16 KiB each."""
    return PlaneTier(form, dict.fromkeys(("base", "d4", "d8"), experts), policy, device="cpu", name="vram")


@given(st.lists(st.tuples(st.sampled_from(["base", "d4", "both", "free"]), st.integers(0, 99)), max_size=60))
def test_no_byte_belongs_to_two_blocks(calls: list[tuple[str, int]]) -> None:
    """Under any order of places taken and given back; a refusal means that no run of free units is long enough."""
    pool = Pool(KINDS, {"base": 3, "d4": 3}, in_ram)
    size = {"base": 5, "d4": 4}
    live: list[dict[str, int]] = []
    for call, number in calls:
        if call == "free":
            if live:
                pool.forget(live.pop(number % len(live)))
            continue
        kinds = ("base", "d4") if call == "both" else (call,)
        places = pool.place(A, kinds, ())
        units = Counter(u for each in live for kind, at in each.items() for u in range(at, at + size[kind]))
        runs = "".join("x" if units[unit] else "." for unit in range(27)).split("x")
        if places is None:
            assert call == "both" or all(len(run) < size[call] for run in runs)
            continue
        live.append(pool.take(kinds, places))
        units.update(u for kind, at in places.items() for u in range(at, at + size[kind]))
        assert set(units) <= set(range(27))
        assert set(units.values()) == {1}
        assert {kind: len(view) for kind, view in pool.views(places).items()} == {
            kind: size[kind] * BLOCK for kind in kinds
        }
    pool.close()


def test_room_is_what_can_be_taken() -> None:
    """`room` is the number of experts that can be taken one after another, and no more."""
    pool = Pool(KINDS, {"base": 4, "d4": 4}, in_ram)
    pool.take(("d4",), pool.place(A, ("d4",), ()) or {})
    for kinds in (("base",), ("base", "d4")):
        room, taken = pool.room(kinds), []
        while places := pool.place(A, kinds, ()):
            taken.append(pool.take(kinds, places))
        assert len(taken) == room > 0
        for places in taken:
            pool.forget(places)


@given(
    levels=st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=6),
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_a_smaller_pool_keeps_whole_experts(levels: list[int], sizes: list[int]) -> None:
    """The least recently used leave, others keep their bytes wherever they move, and none lies beyond the end."""
    tier, leaves = tier_of(4), list[Victim]()
    for number, level in enumerate(levels):
        put(tier, SLICED, ExpertKey(1, number), level)
    resident = tier.resident()
    for experts in sizes:
        order = [key for key in tier.eviction.policies["base"].candidates() if key in resident]
        tier.resize(dict.fromkeys(("base", "d4", "d8"), experts), leaves.append)
        left = [victim.key for victim in leaves]
        leaves.clear()
        size, oldest = experts * SLICED.bytes_at(8), 0
        while sum(SLICED.bytes_at(resident[key]) for key in order[oldest:]) > size:
            oldest += 1
        assert left[:oldest] == order[:oldest]  # more leave only where no run of units is long enough for one
        resident = {key: level for key, level in resident.items() if key not in left}
        check(tier, SLICED, resident)
    tier.close()


def test_blocks_without_another_reference_make_place() -> None:
    """`without` frees units in the search alone, but not units that another block shares."""
    pool = Pool(KINDS[:1], {"base": 1}, in_ram)
    taken = pool.take(("base",), pool.place(A, ("base",), ()) or {})
    assert pool.place(A, ("base",), ()) is None
    assert pool.place(A, ("base",), [taken]) == taken
    assert pool.place(A, ("base",), ()) is None
    pool.refer(taken)
    assert pool.place(A, ("base",), [taken]) is None


def test_levels_share_the_bytes() -> None:
    """The bytes of two experts at level 8 hold four at level 2, which blocks split by kind do not."""
    pooled, split = tier_of(2), tier_of(2, policy=LRU)
    for key in (A, B, C, D):
        put(pooled, SLICED, key, 2)
        put(split, SLICED, key, 2)
    check(pooled, SLICED, dict.fromkeys((A, B, C, D), 2))
    check(split, SLICED, {C: 2, D: 2})
    put(pooled, SLICED, E, 8)
    check(pooled, SLICED, {C: 2, D: 2, E: 8})


def test_victims_are_whole_and_the_oldest() -> None:
    """Only as many are evicted as the new expert needs bytes, and their bytes stay until it is written."""
    tier = tier_of(2)
    put(tier, SLICED, A, 2)
    put(tier, SLICED, B, 4)
    put(tier, SLICED, C, 4)
    reservation = tier.reserve(D, 4)
    assert reservation is not None
    assert [(victim.key, victim.level) for victim in reservation.victims] == [(A, 2), (B, 4)]
    for victim in reservation.victims:
        assert contents(victim.blocks) == expected(SLICED, victim.key, victim.level)
    for kind, block in reservation.into.items():
        write(block, SLICED.content(D, kind, 4))
    tier.release(tier.publish(reservation))
    check(tier, SLICED, {C: 4, D: 4})


def test_leased_and_reserved_bytes_are_not_taken() -> None:
    """A lease keeps its expert's bytes through eviction of all others; the rest is refused."""
    tier = tier_of(1)
    put(tier, SLICED, A, 4)
    lease = tier.acquire(A, 4)
    assert lease is not None
    assert tier.reserve(B, 2) is None
    assert tier.free_experts(2) == 0
    assert contents(lease.blocks) == expected(SLICED, A, 4)
    tier.release(lease)
    put(tier, SLICED, B, 8)
    check(tier, SLICED, {B: 8})
    tier.drop(B)
    assert (tier.free_experts(2), tier.free_experts(8)) == (2, 1)
    tier.close()


@pytest.mark.parametrize(("policy", "survivor"), [(PooledLRU, B), (LRU, A)])
def test_a_prediction_refreshes_an_expert_or_not(policy: type[LRU], survivor: ExpertKey) -> None:
    """A is the oldest and is predicted: the pool evicts it all the same, other policies the expert after it."""
    tier = tier_of(2, policy)
    put(tier, SLICED, A, 8)
    put(tier, SLICED, B, 8)
    predicted = tier.acquire_all({A: 2}, predicted=True)
    tier.release(*predicted.hits)
    put(tier, SLICED, C, 8)
    check(tier, SLICED, {survivor: 8, C: 8})
