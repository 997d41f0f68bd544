"""A tier of planes: experts as versions made of reference-counted blocks.

A *version* is one complete state of an expert: a level and a block of each kind the level needs. It never
changes. Promotion and demotion put another version in its place; blocks that both have are shared. A block
returns to its arena when no version and no reservation refers to it any more, and a version lives as long
as it is resident or pinned. So whoever computes from a lease sees the same bytes until its release,
whatever happens to the expert meanwhile.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from cache.arena import in_ram
from cache.base import Acquired, EvictionPolicy, Lease, Observer, Reservation, Tier, Victim
from cache.block_refs import Indices, SharedBlocks
from cache.free_list import Arenas
from storage.base import LEVELS, Blocks, ExpertKey, ResidentForm
from storage.device import Event


@dataclass(eq=False, slots=True)
class _Version:
    """`pins` counts its leases, and the reservations that it is a victim of."""

    key: ExpertKey
    level: int
    indices: Indices
    blocks: Blocks
    arriving: tuple[Event, ...] = ()
    pins: int = 0


@dataclass(eq=False, slots=True)
class _Pending:
    """What a reservation refers to until it ends."""

    reservation: Reservation
    indices: Indices
    victims: list[_Version]


class PlaneTier(Tier):
    """See Tier. One lock; every method holds it for some microseconds, `reserve` for its search as well.

    Eviction is by kind, and every kind has a policy of its own, told of the experts that have a block of it:
    where a reservation needs a block of which none is free, the first candidate whose block nobody else
    refers to loses it, and with it every plane above; or, under a policy of whole experts, everything.

    Args:
        form: how an expert lies here. A tier that experts move to must have the same.
        capacity: block kind's name -> blocks; a kind that is absent has none.
        policy: makes one that orders residents for eviction; called once for each kind of block.
        device: where the blocks lie, for the leases.
        name: of the tier, for messages.
        arenas: makes the memory there.

    Raises:
        ValueError: a capacity for a kind that the form does not have, or a negative one.
        OSError, torch.OutOfMemoryError: the memory is not to be had.
    """

    def __init__(
        self,
        form: ResidentForm,
        capacity: Mapping[str, int],
        policy: Callable[[], EvictionPolicy],
        *,
        device: str,
        name: str,
        arenas: Arenas = in_ram,
    ) -> None:
        self.device = device
        self.name = name
        self._form = form
        self._blocks = SharedBlocks(form.kinds, capacity, arenas)
        self._names = {level: tuple(k.name for k in form.kinds_at(level)) for level in LEVELS}
        self._level_without = {
            (level, kind): _level_without(form, level, kind)
            for level in LEVELS
            for kind in self._names[level]
        }
        kinds = self._blocks.kinds
        self._policies = {kind: policy() for kind in kinds}
        self._whole = any(policy.whole for policy in self._policies.values())
        self._victims_kinds = kinds[::-1] if self._whole else kinds
        self._resident: dict[ExpertKey, _Version] = {}
        self._first: dict[ExpertKey, None] = {}
        """Residents that are evicted before all others, the last of them first."""
        self._leases: dict[Lease, _Version] = {}
        self._pending: dict[ExpertKey, _Pending] = {}
        self._observers: list[Observer] = []
        self._lock = threading.Lock()

    def level_of(self, key: ExpertKey) -> int:
        """Returns the resident level, 0 if none."""
        with self._lock:
            version = self._resident.get(key)
            return version.level if version else 0

    def free_experts(self, level: int) -> int:
        """Returns how many more experts, whole at `level`, fit without an eviction."""
        with self._lock:
            names = self._names.get(level, ())
            if not names or not set(names) <= set(self._blocks.kinds):
                return 0
            return min(map(self._blocks.available, names))

    def mark_evict_first(self, keys: Sequence[ExpertKey]) -> None:
        """Marks resident `keys` as the first eviction candidates."""
        with self._lock:
            for key in reversed(keys):
                if key in self._resident:
                    self._first.pop(key, None)
                    self._first[key] = None

    def clear_evict_first(self) -> None:
        """Ends every mark of mark_evict_first."""
        with self._lock:
            self._first.clear()

    def resident(self) -> dict[ExpertKey, int]:
        """Returns a snapshot of key -> level."""
        with self._lock:
            return {key: version.level for key, version in self._resident.items()}

    def observe(self, observer: Observer) -> None:
        """Calls `observer` for every resident expert now, and at every change."""
        with self._lock:
            self._observers.append(observer)
            for version in self._resident.values():
                observer(version.key, version.level, version.blocks)

    def acquire(self, key: ExpertKey, level: int) -> Lease | None:
        """Leases the expert if it is resident at `level` or above."""
        leases = self.acquire_all({key: level}).hits
        return leases[0] if leases else None

    def acquire_all(self, wanted: Mapping[ExpertKey, int]) -> Acquired:
        """Leases every expert of `wanted` that is resident at its level or above."""
        acquired = Acquired([], [], [])
        with self._lock:
            resident = []
            for key in sorted(wanted):
                version = self._resident.get(key)
                if version is None:
                    acquired.missing.append(key)
                    continue
                resident.append(key)
                if version.level >= wanted[key]:
                    acquired.hits.append(self._lease(version))
                else:
                    acquired.partial.append(key)
            self._used(resident)
        return acquired

    def mark_used(self, keys: Sequence[ExpertKey]) -> None:
        """Counts resident experts as used."""
        with self._lock:
            self._used(keys)

    def release(self, *leases: Lease) -> None:
        """Ends leases."""
        with self._lock:
            self._release(leases)

    def reserve(self, key: ExpertKey, level: int) -> Reservation | None:
        """See Tier."""
        with self._lock:
            held = self._resident.get(key)
            before = held.level if held else 0
            if key in self._pending or level not in self._names or level <= before:
                reserved = " and reserved" if key in self._pending else ""
                raise ValueError(f"{self.name}: {key} at {level} wanted, it is at {before}{reserved}")
            needed = self._form.rewritten(before, level)
            plan = self._plan(key, needed)
            if plan is None:
                return None
            losers, indices = plan
            for version, left in losers.items():
                version.pins += 1
                self._demote(version, left)
            self._blocks.refer(indices)
            indices |= {kind: self._blocks.take(kind) for kind in needed if kind not in indices}
            reservation = Reservation(
                key,
                level,
                self._blocks.views(indices),
                self._lease(held) if held else None,
                tuple(Victim(version.key, version.level, version.blocks) for version in losers),
            )
            self._pending[key] = _Pending(reservation, indices, list(losers))
            return reservation

    def publish(self, reservation: Reservation, arriving: Event | None = None) -> Lease:
        """See Tier."""
        with self._lock:
            pending = self._end(reservation)
            key, level, held = reservation.key, reservation.level, reservation.held
            have = (self._leases[held].indices if held else {}) | pending.indices
            indices = {kind: have[kind] for kind in self._names[level]}
            self._blocks.refer(indices)
            events = (self._leases[held].arriving if held else ()) + ((arriving,) if arriving else ())
            version = _Version(key, level, indices, self._blocks.views(indices), events)
            self._replace(key, version)
            for kind in indices:
                self._policies[kind].arrived(key)
            self._let_go(pending)
            return self._lease(version)

    def abandon(self, reservation: Reservation) -> None:
        """See Tier."""
        with self._lock:
            self._let_go(self._end(reservation))

    def drop(self, key: ExpertKey, level: int = 0) -> None:
        """See Tier."""
        with self._lock:
            version = self._resident.get(key)
            if version and level < version.level:
                self._demote(version, self._form.demoted(version.level, level))

    def close(self) -> None:
        """Forgets every expert and gives the memory back. Idempotent.

        Raises:
            ValueError: experts are leased or reserved.
            BufferError: somebody still looks at a block.
        """
        with self._lock:
            if self._leases or self._pending:
                raise ValueError(
                    f"{self.name}: {len(self._leases)} leases, {len(self._pending)} reservations"
                )
            for key in list(self._resident):
                self._replace(key, None)
            self._blocks.close()

    def check_integrity(self) -> None:
        """See Tier."""
        with self._lock:
            pins = Counter(self._leases.values())
            pins.update(version for pending in self._pending.values() for version in pending.victims)
            alive = pins.keys() | set(self._resident.values())
            for version in alive:
                assert version.pins == pins[version]
                assert tuple(version.indices) == tuple(version.blocks) == self._names[version.level]
            references = [version.indices for version in alive] + [p.indices for p in self._pending.values()]
            self._blocks.check_integrity(Counter(block for some in references for block in some.items()))
            for kind, policy in self._policies.items():
                holders = [key for key, version in self._resident.items() if kind in version.indices]
                assert sorted(policy.candidates()) == sorted(holders)
            assert self._first.keys() <= self._resident.keys()
            assert all(key == version.key for key, version in self._resident.items())

    # What follows is called with the lock held.

    def _plan(self, key: ExpertKey, needed: Collection[str]) -> tuple[dict[_Version, int], Indices] | None:
        """Who has to make room for one block of each needed kind. Changes nothing.

        A reservation needs one block of a kind and an eviction only ever frees more, so the kinds are
        independent: this finds room exactly where there is some. Kinds in the order in which a victim's
        loss of one frees others: the ones above it, or, where whole experts go, the ones below as well.

        Returns:
            version -> the level left of it; and what of the needed comes free by it. None: no room.
        """
        losers: dict[_Version, int] = {}
        yielded: Indices = {}
        if not set(needed) <= set(self._blocks.kinds):
            return None
        for kind in self._victims_kinds:
            if kind not in needed or kind in yielded or self._blocks.available(kind):
                continue
            version = self._first_to_lose(kind, key)
            if version is None:
                return None
            left = losers[version] = 0 if self._whole else self._level_without[version.level, kind]
            for lost in version.indices.keys() - self._names[left]:
                if lost in needed and self._blocks.sole(lost, version.indices[lost]):
                    yielded.setdefault(lost, version.indices[lost])
        return losers, yielded

    def _first_to_lose(self, kind: str, key: ExpertKey) -> _Version | None:
        """The first candidate, other than `key`, whose block of a kind comes free when it loses it."""
        for candidate in chain(reversed(self._first), self._policies[kind].candidates()):
            version = self._resident[candidate]
            index = version.indices.get(kind)
            if index is None or version.pins or candidate == key:
                continue
            if self._blocks.sole(kind, index):
                return version
        return None

    def _demote(self, version: _Version, level: int) -> None:
        """Leaves resident of `version` what `level` needs."""
        if level == version.level:
            return
        if level == 0:
            self._replace(version.key, None)
            return
        indices = {kind: version.indices[kind] for kind in self._names[level]}
        self._blocks.refer(indices)
        views = self._blocks.views(indices)
        self._replace(version.key, _Version(version.key, level, indices, views, version.arriving))

    def _replace(self, key: ExpertKey, version: _Version | None) -> None:
        """Makes `version`, whose blocks are referred to already, the resident one; None: none is."""
        old = self._resident.pop(key, None)
        if version:
            self._resident[key] = version
        else:
            self._first.pop(key, None)
        for observer in self._observers:
            observer(key, version.level if version else 0, version.blocks if version else {})
        if not old:
            return
        for kind in old.indices:
            if not version or kind not in version.indices:
                self._policies[kind].forgotten(key)
        if not old.pins:
            self._blocks.forget(old.indices)

    def _unpin(self, version: _Version) -> None:
        version.pins -= 1
        if not version.pins and self._resident.get(version.key) is not version:
            self._blocks.forget(version.indices)

    def _used(self, keys: Sequence[ExpertKey]) -> None:
        """Counts uses in the policy of every kind of block that an expert has, and ends its evict-first mark."""
        for key in keys:
            self._first.pop(key, None)
        versions = self._resident
        for kind, policy in self._policies.items():
            policy.used([key for key in keys if kind in versions[key].indices])

    def _lease(self, version: _Version) -> Lease:
        version.pins += 1
        if version.arriving:
            version.arriving = tuple(event for event in version.arriving if not event.done())
        lease = Lease(version.key, version.level, version.blocks, self.device, version.arriving)
        self._leases[lease] = version
        return lease

    def _release(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            version = self._leases.pop(lease, None)
            if version is None:
                raise ValueError(f"{self.name}: expected a lease that has not ended, on {lease.key}")
            self._unpin(version)

    def _end(self, reservation: Reservation) -> _Pending:
        pending = self._pending.get(reservation.key)
        if pending is None or pending.reservation is not reservation:
            raise ValueError(f"{self.name}: no such reservation of {reservation.key}")
        return self._pending.pop(reservation.key)

    def _let_go(self, pending: _Pending) -> None:
        """Drops every reference that a reservation had."""
        self._blocks.forget(pending.indices)
        for version in pending.victims:
            self._unpin(version)
        if pending.reservation.held:
            self._release((pending.reservation.held,))


def _level_without(form: ResidentForm, level: int, kind: str) -> int:
    """The highest level below `level` that an expert gets to by giving up `kind` and what lies above."""
    for low in LEVELS:
        if (
            low < level
            and form.demoted(level, low) == low
            and kind not in (k.name for k in form.kinds_at(low))
        ):
            return low
    raise AssertionError("level 0 has no blocks")
