"""cache.plane_tier: which experts are evicted, how many of their planes, and when blocks become free."""

from __future__ import annotations

import pytest
from integrity import check_integrity
from toys import MERGED, SLICED, ToyForm, check, contents, expected, put, write

from edgemoe.cache.base import EvictionPolicy
from edgemoe.cache.lru import LRU, WholeLRU
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.machine.device import Event
from edgemoe.storage.base import BLOCK, BlockKind, ExpertKey

A, B, C, D, E = (ExpertKey(0, e) for e in range(5))


def tier_of(form: ToyForm, *capacity: int, policy: type[EvictionPolicy] = LRU) -> PlaneTier:
    """A tier with `capacity` blocks of each of the form's kinds, in their order."""
    blocks = dict(zip((kind.name for kind in form.kinds), capacity, strict=True))
    return PlaneTier(form, blocks, policy, device="cpu", name="vram")


def test_the_least_recently_used_expert_is_evicted() -> None:
    """A lease counts as a use, level_of does not."""
    tier = tier_of(MERGED, 3, 0)
    for key in (A, B, C):
        put(tier, MERGED, key, 4)
    lease = tier.acquire(A, 2)
    assert lease is not None
    tier.release(lease)
    assert tier.level_of(B) == 4
    put(tier, MERGED, D, 4)
    check(tier, MERGED, {A: 4, C: 4, D: 4})


def test_a_partial_miss_is_a_use() -> None:
    """An expert requested above its level counts as used, so that it is not evicted before its promotion."""
    tier = tier_of(MERGED, 2, 2)
    put(tier, MERGED, A, 4)
    put(tier, MERGED, B, 4)
    assert tier.acquire(A, 8) is None
    put(tier, MERGED, C, 4)
    check(tier, MERGED, {A: 4, C: 4})


def test_leased_experts_are_not_evicted() -> None:
    """The first candidate without a lease is evicted, though a leased one is older."""
    tier = tier_of(MERGED, 2, 0)
    put(tier, MERGED, A, 4)
    put(tier, MERGED, B, 4)
    lease, younger = tier.acquire(A, 4), tier.acquire(B, 4)
    assert lease is not None
    assert younger is not None
    tier.release(younger)
    put(tier, MERGED, C, 2)
    check(tier, MERGED, {A: 4, C: 2})
    tier.release(lease)


def test_top_planes_are_evicted_first() -> None:
    """Where only p0 is short, the victim keeps level 4; the reservation lists it at its level before."""
    tier = tier_of(MERGED, 4, 2)
    for key in (A, B):
        put(tier, MERGED, key, 8)
    reservation = tier.reserve(C, 8)
    assert reservation is not None
    [victim] = reservation.victims
    assert (victim.key, victim.level) == (A, 8)
    assert contents(victim.blocks) == expected(MERGED, A, 8)
    for kind, block in reservation.into.items():
        write(block, MERGED.content(C, kind, 8))
    tier.release(tier.publish(reservation))
    check(tier, MERGED, {A: 4, B: 8, C: 8})


@pytest.mark.parametrize(
    ("capacity", "level", "rest"),
    [
        ((3, 2, 2), 8, {A: 2, B: 8, C: 8}),  # d4 and d8 are short: A has both, loses both, keeps base
        ((3, 3, 2), 8, {A: 4, B: 8, C: 8}),  # only d8 is short
        ((2, 3, 3), 8, {B: 8, C: 8}),  # only base is short, and nothing stands without it
        ((2, 2, 2), 2, {B: 8, C: 2}),  # base again, for a reservation at a low level
        ((3, 2, 2), 2, {A: 8, B: 8, C: 2}),  # nothing is short
    ],
)
def test_a_victim_loses_a_kind_and_what_lies_above(
    capacity: tuple[int, ...], level: int, rest: dict[ExpertKey, int]
) -> None:
    """A victim keeps the highest level of which it still has all planes."""
    tier = tier_of(SLICED, *capacity)
    put(tier, SLICED, A, 8)
    put(tier, SLICED, B, 8)
    put(tier, SLICED, C, level)
    check(tier, SLICED, rest)


@pytest.mark.parametrize(
    ("capacity", "level", "rest"),
    [
        ((3, 2, 2), 8, {B: 8, C: 8}),  # d4 and d8 are short
        ((3, 3, 2), 8, {B: 8, C: 8}),  # only d8 is short
        ((2, 3, 3), 2, {B: 8, C: 2}),  # only base is
        ((3, 2, 2), 2, {A: 8, B: 8, C: 2}),  # nothing is
    ],
)
def test_a_policy_of_whole_experts_evicts_all_of_a_victim(
    capacity: tuple[int, ...], level: int, rest: dict[ExpertKey, int]
) -> None:
    """Whichever block is short, all blocks of the victim become free."""
    tier = tier_of(SLICED, *capacity, policy=WholeLRU)
    put(tier, SLICED, A, 8)
    put(tier, SLICED, B, 8)
    put(tier, SLICED, C, level)
    check(tier, SLICED, rest)


def test_one_whole_victim_is_enough_where_it_has_all_kinds() -> None:
    """No expert is evicted for a low block where the victim of a high one frees a low one as well."""
    tier = tier_of(SLICED, 2, 1, 1, policy=WholeLRU)
    put(tier, SLICED, A, 2)
    put(tier, SLICED, B, 8)
    put(tier, SLICED, C, 8)
    check(tier, SLICED, {A: 2, C: 8})


def test_each_kind_finds_its_own_victim() -> None:
    """One reservation may take different kinds from different experts, each the oldest that has one."""
    tier = tier_of(SLICED, 4, 1, 1)
    put(tier, SLICED, A, 2)
    put(tier, SLICED, B, 2)
    put(tier, SLICED, C, 8)
    put(tier, SLICED, D, 2)
    reservation = tier.reserve(E, 8)
    assert reservation is not None
    assert [(victim.key, victim.level) for victim in reservation.victims] == [(A, 2), (C, 8)]
    assert tier.resident() == {B: 2, C: 2, D: 2}
    tier.abandon(reservation)
    check(tier, SLICED, {B: 2, C: 2, D: 2})


def test_a_refused_reservation_evicts_no_expert() -> None:
    """Where one of two kinds has no block, the expert with a block of the other kind stays."""
    tier = tier_of(SLICED, 2, 1, 1)
    put(tier, SLICED, A, 2)
    put(tier, SLICED, B, 8)
    lease = tier.acquire(B, 8)
    assert lease is not None
    assert tier.reserve(C, 4) is None
    check(tier, SLICED, {A: 2, B: 8})
    tier.release(lease)


def test_an_expert_is_not_evicted_for_its_own_promotion() -> None:
    """A promotion that needs its new block and its old one at once is refused."""
    tier = tier_of(MERGED, 1, 1)
    put(tier, MERGED, A, 2)
    assert tier.reserve(A, 4) is None
    check(tier, MERGED, {A: 2})
    tier.drop(A)
    put(tier, MERGED, A, 4)
    check(tier, MERGED, {A: 4})


def test_a_promotion_may_evict_others() -> None:
    """An expert that is promoted is older than its victim, and stays."""
    tier = tier_of(MERGED, 2, 0)
    put(tier, MERGED, A, 2)
    put(tier, MERGED, B, 2)
    put(tier, MERGED, A, 4)
    check(tier, MERGED, {A: 4})


def test_a_shared_block_is_free_after_its_last_lease() -> None:
    """A base block that an earlier lease shares with the promoted expert is not free."""
    tier = tier_of(SLICED, 1, 1, 0)
    put(tier, SLICED, A, 2)
    lease = tier.acquire(A, 2)
    assert lease is not None
    put(tier, SLICED, A, 4)
    assert tier.reserve(B, 2) is None
    tier.drop(A)
    assert tier.reserve(B, 2) is None
    tier.release(lease)
    put(tier, SLICED, B, 2)
    check(tier, SLICED, {B: 2})


def test_an_upper_block_may_be_shared_where_a_lower_was_replaced() -> None:
    """A promotion that replaces p4 and keeps d4 frees p4 alone while an earlier lease has d4."""

    class Rebased(ToyForm):
        def rewritten(self, resident: int, level: int) -> tuple[str, ...]:
            added = tuple(kind.name for kind in self.kinds_at(level) if kind.level > resident)
            return ("p4", *added) if resident else added

    kinds = [BlockKind("p4", BLOCK, 2), BlockKind("d4", BLOCK, 4), BlockKind("p0", BLOCK, 8)]
    form = Rebased(kinds, merged=True)
    tier = PlaneTier(form, {"p4": 2, "d4": 1, "p0": 1}, LRU, device="cpu", name="vram")
    put(tier, form, A, 4)
    lease = tier.acquire(A, 4)
    assert lease is not None
    put(tier, form, A, 8)
    assert tier.reserve(B, 4) is None
    tier.release(lease)
    assert tier.reserve(B, 4) is not None
    check_integrity(tier)


def test_a_victims_surplus_waits_for_the_reservation() -> None:
    """Blocks of a victim that the reservation does not need keep their bytes until it ends, and are free then."""
    tier = tier_of(SLICED, 1, 1, 1)
    put(tier, SLICED, A, 8)
    reservation = tier.reserve(B, 2)
    assert reservation is not None
    assert list(reservation.into) == ["base"]
    assert contents(reservation.victims[0].blocks) == expected(SLICED, A, 8)
    write(reservation.into["base"], SLICED.content(B, "base", 2))
    tier.release(tier.publish(reservation))
    put(tier, SLICED, B, 8)
    check(tier, SLICED, {B: 8})


@pytest.mark.parametrize(("capacity", "level"), [((2, 0), 8), ((0, 2), 2)])
def test_a_kind_without_blocks_never_fits(capacity: tuple[int, ...], level: int) -> None:
    """A level that needs a kind without blocks is refused, and no block is reserved."""
    tier = tier_of(MERGED, *capacity)
    assert tier.reserve(A, level) is None
    check(tier, MERGED, {})


def test_a_level_above_the_forms_never_fits() -> None:
    """A form may name a kind of which its store has no planes; the tier has no blocks of it."""

    class Short(ToyForm):
        def rewritten(self, resident: int, level: int) -> tuple[str, ...]:
            return (*super().rewritten(resident, level), *(("p0",) if level == 8 else ()))

    tier = PlaneTier(Short([BlockKind("p4", BLOCK, 2)], True), {"p4": 2}, LRU, device="cpu", name="vram")
    assert tier.reserve(A, 8) is None
    check_integrity(tier)


def test_close_refuses_while_in_use() -> None:
    """Memory with a lease on it is not freed; after the release it is, once."""
    tier = tier_of(MERGED, 1, 1)
    put(tier, MERGED, A, 8)
    lease = tier.acquire(A, 8)
    assert lease is not None
    with pytest.raises(ValueError, match="1 leases"):
        tier.close()
    assert contents(lease.blocks) == expected(MERGED, A, 8)
    tier.release(lease)
    tier.close()
    tier.close()


class Copy(Event):
    """Done when the test sets `over`."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        raise AssertionError("a tier waits for nothing")


def test_a_lease_has_the_events_of_copies_under_way() -> None:
    """Until a copy is done every lease on its blocks carries its event, also after a promotion or demotion.

    So does the tier without a lease, for an expert that is computed from without a request.
    """
    tier = tier_of(SLICED, 3, 3, 3)
    first, second = Copy(), Copy()

    def arriving(level: int) -> tuple[Event, ...]:
        lease = tier.acquire(A, level)
        assert lease is not None
        tier.release(lease)
        return lease.arriving

    for level, event in ((2, first), (8, second)):
        reservation = tier.reserve(A, level)
        assert reservation is not None
        tier.release(tier.publish(reservation, event))
    assert set(arriving(8)) == set(tier.arriving([A])) == {first, second}
    tier.drop(A, 4)
    assert set(arriving(4)) == {first, second}
    first.over = True
    assert tier.arriving([A]) == [second]
    assert arriving(4) == (second,)
    second.over = True
    assert tier.arriving([A]) == []
    assert arriving(4) == ()


def marked_tier() -> PlaneTier:
    """A tier whose blocks A, B, C and D have, A the least recently used."""
    tier = tier_of(MERGED, 4, 0)
    for key in (A, B, C, D):
        put(tier, MERGED, key, 4)
    return tier


def test_marked_experts_are_evicted_first() -> None:
    """The first key of the latest call first, then the rest of it, then the keys of the call before."""
    tier = marked_tier()
    tier.mark_evict_first([D])
    tier.mark_evict_first([C, E, B])
    gone = []
    for expert in range(4):
        reservation = tier.reserve(ExpertKey(1, expert), 4)
        assert reservation is not None
        gone += [victim.key for victim in reservation.victims]
    assert gone == [C, B, D, A]


def test_a_use_ends_a_mark() -> None:
    """A lease, a partial miss and mark_used each end the mark of their expert."""
    tier = marked_tier()
    tier.mark_evict_first([B, C, D])
    tier.release(*tier.acquire_all({B: 4, C: 8}).hits)
    tier.mark_used([D])
    put(tier, MERGED, E, 4)
    check(tier, MERGED, dict.fromkeys((B, C, D, E), 4))


def test_marks_can_be_cleared() -> None:
    """After clear_evict_first the policy alone orders the experts."""
    tier = marked_tier()
    tier.mark_evict_first([D])
    tier.clear_evict_first()
    put(tier, MERGED, E, 4)
    check(tier, MERGED, dict.fromkeys((B, C, D, E), 4))


def test_free_experts_counts_whole_ones() -> None:
    """The scarcest kind of a level counts, a resident expert's blocks do not, and 3 is no level."""
    tier = tier_of(SLICED, 4, 3, 0)
    put(tier, SLICED, A, 4)
    assert [tier.free_experts(level) for level in (0, 2, 3, 4, 8)] == [0, 3, 0, 2, 0]


def test_victims_that_are_not_kept_are_free_at_once() -> None:
    """Blocks of a victim that a reservation does not need serve the next one, before the first ends."""
    tier = tier_of(SLICED, 1, 1, 1, policy=WholeLRU)
    put(tier, SLICED, A, 8)
    reservation = tier.reserve(B, 2, keep_victims=False)
    assert reservation is not None
    assert reservation.victims == ()
    assert contents(reservation.into).keys() == {"base"}
    assert [tier.blocks.room((kind,)) for kind in ("base", "d4", "d8")] == [0, 1, 1]
    tier.abandon(reservation)
    check(tier, SLICED, {})
