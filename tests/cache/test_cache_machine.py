"""Compares tier and budget with models of plain dicts, after every call of any sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from integrity import check_integrity
from toys import MERGED, SLICED, ToyForm

from edgemoe.cache.base import EvictionPolicy, Lease, Reservation, Victim
from edgemoe.cache.budget import Budget
from edgemoe.cache.lru import LRU, WholeLRU
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.errors import DoesNotFit
from edgemoe.storage.base import LEVELS, Blocks, ExpertKey

pytestmark = pytest.mark.e2e

KEYS = [ExpertKey(layer, expert) for layer in range(2) for expert in range(3)]

Serials = dict[str, int]
"""Block kind's name -> the number that fills the block. No number is used twice."""


@dataclass(frozen=True)
class Version:
    """An expert in the model: its level and the numbers in its blocks."""

    level: int
    serials: Serials


@dataclass(eq=False)
class Incoming:
    """A reservation in the model: the numbers in its new blocks, and in its victims' blocks."""

    key: ExpertKey
    level: int
    serials: Serials
    before: Version | None
    victims: list[Serials]


def lower_levels(form: ToyForm, level: int) -> list[int]:
    """The levels that an expert at `level` can be demoted to, by hand for both forms."""
    if form is MERGED:
        return {8: [4, 0], 4: [0], 2: [0]}[level]
    return {8: [4, 2, 0], 4: [2, 0], 2: [0]}[level]


class TierMachine(RuleBasedStateMachine):
    """The model has versions, leases, reservations and evict-first marks; free blocks follow from these alone."""

    form: ToyForm
    policy: type[EvictionPolicy] = LRU
    leases = Bundle("leases")
    reservations = Bundle("reservations")

    @initialize(capacity=st.lists(st.integers(0, 4), min_size=3, max_size=3))
    def build(self, capacity: list[int]) -> None:
        self.capacity = dict(zip((kind.name for kind in self.form.kinds), capacity, strict=False))
        self.allocated = dict(self.capacity)
        self.tier = PlaneTier(self.form, self.capacity, self.policy, device="cpu", name="machine")
        self.resident: dict[ExpertKey, Version] = {}  # the least recently used first
        self.leased: dict[Lease, Version] = {}
        self.incoming: dict[Reservation, Incoming] = {}
        self.marked: list[ExpertKey] = []  # the last is evicted first
        self.mirrors: list[dict[ExpertKey, tuple[int, Blocks]]] = []
        self.last_serial = 0
        self.observe()

    def pinned(self, kind: str) -> set[int]:
        """Serials of the blocks of a kind that are leased or part of a reservation."""
        versions = [*self.leased.values(), *(i.before for i in self.incoming.values() if i.before)]
        serials = [v.serials for v in versions]
        for incoming in self.incoming.values():
            serials += [incoming.serials, *incoming.victims]
        return {some[kind] for some in serials if kind in some}

    def free(self, kind: str) -> int:
        """Blocks of a kind that nothing refers to."""
        of_residents = {v.serials[kind] for v in self.resident.values() if kind in v.serials}
        return self.capacity[kind] - len(self.pinned(kind) | of_residents)

    def eviction(self, key: ExpertKey, names: tuple[str, ...]) -> dict[ExpertKey, int] | None:
        """Victim -> level that it is demoted to. None: no eviction frees the blocks."""
        victims: dict[ExpertKey, int] = {}
        gained: set[str] = set()
        whole = self.policy is WholeLRU
        kinds = [k.name for k in self.form.kinds if k.name in names]
        for kind in reversed(kinds) if whole else kinds:
            if kind in gained or self.free(kind):
                continue
            pinned = self.pinned(kind)
            leased = {id(v) for v in self.leased.values()}
            able = [
                k
                for k in [*reversed(self.marked), *self.resident]
                if k != key
                and id(v := self.resident[k]) not in leased
                and kind in v.serials
                and v.serials[kind] not in pinned
            ]
            if not able:
                return None
            version = self.resident[able[0]]
            levels = [0] if whole else lower_levels(self.form, version.level)
            left = next(low for low in levels if kind not in {k.name for k in self.form.kinds_at(low)})
            victims[able[0]] = left
            lost = set(version.serials) - {k.name for k in self.form.kinds_at(left)}
            gained |= {k for k in lost if version.serials[k] not in self.pinned(k)}
        return victims

    def lower(self, key: ExpertKey, level: int) -> None:
        """Demotes a resident; its place in the order stays."""
        kinds = {kind.name for kind in self.form.kinds_at(level)}
        old = self.resident[key]
        if level:
            serials = {k: serial for k, serial in old.serials.items() if k in kinds}
            self.resident[key] = Version(level, serials)
        else:
            del self.resident[key]
            self.unmark(key)

    def touch(self, key: ExpertKey) -> None:
        """Counts a use of a resident: it goes to the end of the order, without a mark."""
        self.resident[key] = self.resident.pop(key)
        self.unmark(key)

    def unmark(self, key: ExpertKey) -> None:
        self.marked = [marked for marked in self.marked if marked != key]

    @rule(target=leases, key=st.sampled_from(KEYS), level=st.sampled_from([2, 4, 8]))
    def acquire(self, key: ExpertKey, level: int) -> Lease:
        lease = self.tier.acquire(key, level)
        version = self.resident.get(key)
        if version:
            self.touch(key)
        if version is None or version.level < level:
            assert lease is None
            return multiple()
        assert lease is not None
        assert (lease.key, lease.level) == (key, version.level)
        self.leased[lease] = version
        return lease

    @rule(target=leases, levels=st.dictionaries(st.sampled_from(KEYS), st.sampled_from([2, 4, 8])))
    def acquire_all(self, levels: dict[ExpertKey, int]) -> Lease:
        acquired = self.tier.acquire_all(levels)
        present = [key for key in sorted(levels) if key in self.resident]
        hits = [key for key in present if self.resident[key].level >= levels[key]]
        assert [(lease.key, lease.level) for lease in acquired.hits] == [
            (key, self.resident[key].level) for key in hits
        ]
        assert acquired.partial == [key for key in present if key not in hits]
        assert acquired.missing == [key for key in sorted(levels) if key not in present]
        for key in present:
            self.touch(key)
        self.leased |= {lease: self.resident[lease.key] for lease in acquired.hits}
        return multiple(*acquired.hits)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def mark_used(self, keys: list[ExpertKey]) -> None:
        present = [key for key in keys if key in self.resident]
        self.tier.mark_used(present)
        for key in present:
            self.touch(key)

    @rule(keys=st.lists(st.sampled_from(KEYS), unique=True))
    def mark_evict_first(self, keys: list[ExpertKey]) -> None:
        self.tier.mark_evict_first(keys)
        for key in reversed(keys):
            if key in self.resident:
                self.unmark(key)
                self.marked.append(key)

    @rule()
    def clear_evict_first(self) -> None:
        self.tier.clear_evict_first()
        self.marked = []

    @precondition(lambda self: len(self.mirrors) < 3)
    @rule()
    def observe(self) -> None:
        """Adds a mirror of the tier, which its observer alone fills."""
        mirror: dict[ExpertKey, tuple[int, Blocks]] = {}
        self.mirrors.append(mirror)

        def observer(key: ExpertKey, level: int, blocks: Blocks) -> None:
            if level:
                mirror[key] = level, blocks
            else:
                assert not blocks
                del mirror[key]

        self.tier.observe(observer)

    @rule(lease=consumes(leases))
    def release(self, lease: Lease) -> None:
        del self.leased[lease]
        self.tier.release(lease)

    @rule(target=reservations, key=st.sampled_from(KEYS), level=st.sampled_from([2, 4, 8]))
    def reserve(self, key: ExpertKey, level: int) -> Reservation:
        start = self.resident.get(key)
        before = start.level if start else 0
        if level <= before or any(i.key == key for i in self.incoming.values()):
            with pytest.raises(ValueError, match="expected a level above"):
                self.tier.reserve(key, level)
            return multiple()
        needed = self.form.rewritten(before, level)
        victims = self.eviction(key, needed)
        reservation = self.tier.reserve(key, level)
        if victims is None:
            assert reservation is None
            return multiple()
        assert reservation is not None
        assert [(v.key, v.level) for v in reservation.victims] == [
            (k, self.resident[k].level) for k in victims
        ]
        for victim in reservation.victims:
            assert_filled(victim.blocks, self.resident[victim.key].serials)
        for victim_key, left in victims.items():
            self.lower(victim_key, left)
        serials = {}
        for kind, block in reservation.into.items():
            self.last_serial += 1
            serials[kind] = self.last_serial
            np.frombuffer(block, np.uint32)[:] = self.last_serial
        assert set(serials) == set(needed)
        overwritten = [{k: first_word(b) for k, b in v.blocks.items()} for v in reservation.victims]
        self.incoming[reservation] = Incoming(key, level, serials, start, overwritten)
        return reservation

    @rule(target=leases, reservation=consumes(reservations))
    def publish(self, reservation: Reservation) -> Lease:
        incoming = self.incoming.pop(reservation)
        lease = self.tier.publish(reservation)
        kept = incoming.before.serials if incoming.before else {}
        version = Version(incoming.level, kept | incoming.serials)
        self.resident.pop(incoming.key, None)
        self.resident[incoming.key] = version
        self.leased[lease] = version
        assert (lease.key, lease.level) == (incoming.key, incoming.level)
        return lease

    @rule(reservation=consumes(reservations))
    def abandon(self, reservation: Reservation) -> None:
        del self.incoming[reservation]
        self.tier.abandon(reservation)

    @rule(key=st.sampled_from(KEYS), level=st.sampled_from(LEVELS))
    def drop(self, key: ExpertKey, level: int) -> None:
        self.tier.drop(key, level)
        have = self.resident[key].level if key in self.resident else 0
        if have > level:
            reached = min((low for low in lower_levels(self.form, have) if low >= level), default=have)
            if reached < have:
                self.lower(key, reached)

    @rule(blocks=st.lists(st.integers(0, 4), min_size=3, max_size=3))
    def resize(self, blocks: list[int]) -> None:
        """Fewer blocks: the first candidates lose theirs, others keep their bytes; more: they are free."""
        names = [kind.name for kind in self.form.kinds]
        new = {name: min(n, self.allocated[name]) for name, n in zip(names, blocks, strict=False)}
        if self.leased or self.incoming:
            with pytest.raises(ValueError, match="leased or reserved"):
                self.tier.resize(new)
            return
        whole, left = self.policy is WholeLRU, []
        for kind in reversed(names) if whole else names:
            while sum(kind in version.serials for version in self.resident.values()) > new[kind]:
                order = [*reversed(self.marked), *self.resident]
                victim = next(key for key in order if kind in self.resident[key].serials)
                version = self.resident[victim]
                levels = [0] if whole else lower_levels(self.form, version.level)
                level = next(low for low in levels if kind not in {k.name for k in self.form.kinds_at(low)})
                if level == 0:
                    left.append((victim, version))
                self.lower(victim, level)
        expected = iter(left)

        def evicted(victim: Victim) -> None:
            key, version = next(expected)
            assert (victim.key, victim.level) == (key, version.level)
            assert_filled(victim.blocks, version.serials)

        self.tier.resize(new, evicted)
        assert next(expected, None) is None
        self.capacity = new

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "tier"):
            return
        check_integrity(self.tier)
        assert self.tier.resident() == {key: version.level for key, version in self.resident.items()}
        for mirror in self.mirrors:
            assert mirror.keys() == self.resident.keys()
            for key, (level, blocks) in mirror.items():
                assert level == self.resident[key].level
                assert_filled(blocks, self.resident[key].serials)
        for level in LEVELS:
            kinds = [kind.name for kind in self.form.kinds_at(level)]
            assert self.tier.free_experts(level) == min(map(self.free, kinds), default=0)
        for lease, version in self.leased.items():
            assert_filled(lease.blocks, version.serials)
        for reservation, incoming in self.incoming.items():
            assert_filled(reservation.into, incoming.serials)
            for victim, serials in zip(reservation.victims, incoming.victims, strict=True):
                assert_filled(victim.blocks, serials)
            if incoming.before:
                assert reservation.lease is not None
                assert_filled(reservation.lease.blocks, incoming.before.serials)


def first_word(block: memoryview) -> int:
    return int(np.frombuffer(block, np.uint32)[0])


def assert_filled(blocks: Blocks, serials: Serials) -> None:
    """Asserts that blocks are of the kinds of `serials`, each filled with its serial."""
    assert blocks.keys() == serials.keys()
    for kind, block in blocks.items():
        assert (np.frombuffer(block, np.uint32) == serials[kind]).all()


class MergedMachine(TierMachine):
    form = MERGED


class SlicedMachine(TierMachine):
    form = SLICED


class WholeMachine(TierMachine):
    form = SLICED
    policy = WholeLRU


class BudgetMachine(RuleBasedStateMachine):
    """The model is a dict of the bytes of each name."""

    names = st.sampled_from(["dense", "kv", "planes"])
    sizes = st.integers(0, 60)

    @initialize(limit=st.integers(0, 100))
    def build(self, limit: int) -> None:
        self.budget = Budget(limit)
        self.model: dict[str, int] = {}

    @rule(name=names, size=sizes)
    def reserve(self, name: str, size: int) -> None:
        wanted = sum(self.model.values()) + size
        if wanted <= self.budget.limit:
            self.budget.reserve(name, size)
            self.model[name] = self.model.get(name, 0) + size
        else:
            with pytest.raises(DoesNotFit) as caught:
                self.budget.reserve(name, size)
            assert caught.value.minimum == wanted

    @rule(name=names, size=sizes)
    def release(self, name: str, size: int) -> None:
        size = min(size, self.model.get(name, 0))
        self.budget.release(size)
        self.model[name] = self.model.get(name, 0) - size

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "budget"):
            assert self.budget.used_bytes == sum(self.model.values())


TestMergedTier = MergedMachine.TestCase
TestMergedTier.settings = settings(max_examples=40, stateful_step_count=40)
TestSlicedTier = SlicedMachine.TestCase
TestSlicedTier.settings = settings(max_examples=40, stateful_step_count=40)
TestWholeTier = WholeMachine.TestCase
TestWholeTier.settings = settings(max_examples=40, stateful_step_count=40)
TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=40, stateful_step_count=20)
