"""A tier of planes: experts as versions made of reference-counted blocks.

A *version* is one complete state of an expert: a level and a block of each kind that the level needs. It never changes.
Promotion and demotion put another version in its place, which shares the common blocks. A block returns to its arena
with the last version or reservation that refers to it, and a version lives as long as it is resident or pinned. So a
lease shows the same bytes until its release, through any promotion, demotion or eviction of its expert.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from edgemoe.cache.arena import in_ram
from edgemoe.cache.base import Acquired, EvictionPolicy, Lease, Observer, Reservation, Victim
from edgemoe.cache.block_refs import Indices, SharedBlocks
from edgemoe.cache.fixed_places import FixedPlaces
from edgemoe.cache.free_list import Arenas
from edgemoe.cache.pool import Pool
from edgemoe.machine.device import Event
from edgemoe.storage.base import LEVELS, Blocks, ExpertKey, ResidentForm


@dataclass(eq=False, slots=True)
class _Version:
    """A version; `pins` counts its leases, and the reservations whose victim it is."""

    key: ExpertKey
    level: int
    indices: Indices
    blocks: Blocks
    arriving: tuple[Event, ...] = ()
    pins: int = 0


@dataclass(eq=False, slots=True)
class _Pending:
    """A reservation and the blocks and versions that it refers to until it ends."""

    reservation: Reservation
    indices: Indices
    victims: list[_Version]


class PlaneTier:
    """One memory tier, with one lock, which every method takes for some microseconds, `reserve` for its search as well.

    Eviction is by kind of block, and every kind has a policy of its own, which sees the experts that have such a block.
    Where a reservation needs a block and none is free, the first candidate whose block has no other reference loses it
    and every plane above it; under a policy of whole experts it loses everything. Under a pooled policy all kinds share
    the bytes of `capacity`, and candidates lose everything until neighbouring bytes are free for each needed block. So
    they do among fixed places, until the bytes of one are free.

    Args:
        form: of experts in this tier, and in any tier that they move to.
        capacity: block kind's name -> blocks; an absent kind has none.
        policy: makes a policy; called once for each kind of block.
        device: the memory that the blocks lie in, for leases.
        name: of the tier, for messages.
        arenas: allocates the memory.
        places: of each expert's block, in place of blocks of `capacity` and `arenas`.

    Raises:
        OSError, torch.OutOfMemoryError: the system or the device refuses so much memory.
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
        places: FixedPlaces | None = None,
    ) -> None:
        self.device = device
        self.name = name
        self._form = form
        policies = {kind.name: policy() for kind in form.kinds}
        pooled = any(each.pooled for each in policies.values())
        self._blocks = places or (Pool if pooled else SharedBlocks)(form.kinds, capacity, arenas)
        self._names = {level: tuple(k.name for k in form.kinds_at(level)) for level in LEVELS}
        # The highest level below `level` that needs neither `kind` nor a kind above it.
        self._level_without = {
            (level, kind): next(
                low
                for low in LEVELS
                if low < level and kind not in self._names[low] and form.demoted(level, low) == low
            )
            for level in LEVELS
            for kind in self._names[level]
        }
        self._rewritten = {
            (before, level): form.rewritten(before, level)
            for level in LEVELS
            for before in LEVELS
            if before < level
        }
        kinds = self._blocks.kinds
        self._policies = {kind: policies[kind] for kind in kinds}
        self._whole = any(each.whole for each in policies.values())
        self._counts_predictions = all(each.counts_predictions for each in policies.values())
        self._victims_kinds = kinds[::-1] if self._whole else kinds
        self._resident: dict[ExpertKey, _Version] = {}
        self._first: dict[ExpertKey, None] = {}
        """Residents marked for eviction before all others, the last of them first."""
        self._last: frozenset[ExpertKey] = frozenset()
        """Experts that are evicted after all others."""
        self._leases: dict[Lease, _Version] = {}
        self._pending: dict[ExpertKey, _Pending] = {}
        self._observers: list[Observer] = []
        self._lock = threading.Lock()

    def level_of(self, key: ExpertKey) -> int:
        """Returns the resident level, 0 if none. Does not count as a use."""
        with self._lock:
            version = self._resident.get(key)
            return version.level if version else 0

    def free_experts(self, level: int) -> int:
        """Returns how many more experts, whole at `level`, fit without an eviction; 0 for what is no level."""
        with self._lock:
            names = self._names.get(level, ())
            if not names or not set(names) <= set(self._blocks.kinds):
                return 0
            return self._blocks.room(names)

    def mark_evict_first(self, keys: Sequence[ExpertKey]) -> None:
        """Marks resident `keys` as the first eviction candidates, most recent call first.

        A mark ends when its expert is used, or with clear_evict_first.
        """
        with self._lock:
            for key in reversed(keys):
                if key in self._resident:
                    self._first.pop(key, None)
                    self._first[key] = None

    def clear_evict_first(self) -> None:
        """Ends every mark of mark_evict_first."""
        with self._lock:
            self._first.clear()

    def set_evict_last(self, keys: Iterable[ExpertKey]) -> None:
        """Makes these the last eviction candidates, in the policy's order, in place of those set before."""
        with self._lock:
            self._last = frozenset(keys)

    def resident(self) -> dict[ExpertKey, int]:
        """Returns a snapshot of key -> level."""
        with self._lock:
            return {key: version.level for key, version in self._resident.items()}

    def heat(self) -> dict[ExpertKey, float]:
        """Returns how hot each expert is by the policy of the base planes (EvictionPolicy.heat)."""
        with self._lock:
            return self._policies[self._blocks.kinds[0]].heat()

    def observe(self, observer: Observer) -> None:
        """Calls `observer` for every resident expert now, and whenever an expert arrives, changes its level or goes.

        The calls come from the thread that changes the tier, under its lock: the observer must not call the tier. Until
        the next change of the tier the blocks of an observed expert are neither written nor reused.
        """
        with self._lock:
            self._observers.append(observer)
            for version in self._resident.values():
                observer(version.key, version.level, version.blocks)

    def arriving(self, keys: Iterable[ExpertKey]) -> list[Event]:
        """Returns the events behind copies that still fill blocks of resident `keys`."""
        with self._lock:
            versions = [self._resident[key] for key in keys]
            for version in versions:
                _drop_done(version)
            return [event for version in versions for event in version.arriving]

    def acquire(self, key: ExpertKey, level: int) -> Lease | None:
        """Leases the expert if it is resident at `level` or above; None otherwise.

        A higher resident level is a hit and is used as it is (conservative reuse). Whatever is resident counts as used,
        on a partial miss too: an expert about to be promoted must not be evicted for others first.
        """
        leases = self.acquire_all({key: level}).hits
        return leases[0] if leases else None

    def acquire_all(self, wanted: Mapping[ExpertKey, int], *, predicted: bool = False) -> Acquired:
        """Does what `acquire` does for several experts at once, in the order of their keys.

        Args:
            wanted: key -> level.
            predicted: they are not requested yet: a use only where the policy counts predictions.
        """
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
            if not predicted or self._counts_predictions:
                self._used(resident)
        return acquired

    def mark_used(self, keys: Sequence[ExpertKey]) -> None:
        """Counts experts as used, in this order, as leasing them would; those that are not resident are passed over."""
        with self._lock:
            self._used([key for key in keys if key in self._resident])

    def release(self, *leases: Lease) -> None:
        """Ends leases.

        Raises:
            ValueError: one has ended.
        """
        with self._lock:
            self._release(leases)

    def reserve(
        self, key: ExpertKey, level: int, *, keep_victims: bool = True, evict: bool = True
    ) -> Reservation | None:
        """Sets blocks aside that bring `key` to `level`, evicting experts that are not leased.

        Only missing blocks are reserved (promotion). The caller owns the reservation and ends it.

        Args:
            key: the expert.
            level: that it is to reach.
            keep_victims: lists the evicted, whose other blocks stay as they are until the reservation ends; False:
                those are free at once, and none is listed.
            evict: False takes free blocks only.

        Returns:
            None, with nothing changed, while too many blocks are leased or reserved.

        Raises:
            ValueError: the key has a reservation, is resident at the level already, or it is no level.
        """
        with self._lock:
            held = self._resident.get(key)
            before = held.level if held else 0
            if key in self._pending or level not in self._names or level <= before:
                reserved = " and reserved" if key in self._pending else ""
                raise ValueError(
                    f"{self.name}: expected a level above {before}{reserved} for {key}, got {level}"
                )
            needed = self._rewritten[before, level]
            plan = self._plan(key, needed)
            if plan is None or (plan[0] and not evict):
                return None
            losers, yielded = plan
            for version, left in losers.items():
                version.pins += 1
                self._demote(version, left)
            indices = self._blocks.take(needed, yielded)
            kept, victims = list(losers) if keep_victims else [], []
            for version in losers.keys() - kept:
                self._unpin(version)
            for version in kept:
                victims.append(Victim(version.key, version.level, version.blocks))
            lease = self._lease(held) if held else None
            reservation = Reservation(key, level, self._blocks.views(indices), lease, tuple(victims))
            self._pending[key] = _Pending(reservation, indices, kept)
            return reservation

    def publish(self, reservation: Reservation, arriving: Event | None = None) -> Lease:
        """Makes the filled blocks visible in one step and leases them to the caller. Ends the reservation.

        Args:
            reservation: of this tier.
            arriving: behind the device's copies that fill the blocks; leases carry it until it is done.

        Raises:
            ValueError: the reservation has ended.
        """
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
            self._drop_references(pending)
            return self._lease(version)

    def abandon(self, reservation: Reservation) -> None:
        """Frees the reserved blocks. Ends the reservation; planes resident before stay, victims do not come back.

        Raises:
            ValueError: the reservation has ended.
        """
        with self._lock:
            self._drop_references(self._end(reservation))

    def drop(self, key: ExpertKey, level: int = 0) -> None:
        """Demotes the expert to `level`; 0 evicts it. Leased blocks become free on their release.

        Frees whole blocks and changes none, so it stops at ResidentForm.demoted. Without effect on an expert that is
        not resident above `level`.
        """
        with self._lock:
            version = self._resident.get(key)
            if version and level < version.level:
                self._demote(version, self._form.demoted(version.level, level))

    def resize(
        self, capacity: Mapping[str, int], evicted: Callable[[Victim], None] = lambda victim: None
    ) -> None:
        """Changes the number of blocks, and takes or returns their memory.

        Experts without a block leave in the order of eviction, whole or in part; others keep their planes, some of them
        in other blocks, and observers see these.

        Args:
            capacity: kind's name -> blocks, at most as many as the tier began with.
            evicted: called with every expert that leaves whole, while its blocks are as they were; it must not call
                this tier.

        Raises:
            ValueError: experts are leased or reserved, or have places of their own; nothing has changed.
        """
        blocks = self._blocks
        if isinstance(blocks, FixedPlaces):
            raise ValueError(f"{self.name}: expected blocks for any expert, got a place for each")
        with self._lock:
            self._require_unpinned()
            for kind in blocks.kinds[:1] if isinstance(blocks, Pool) else self._victims_kinds:
                while blocks.exceeds(kind, capacity):
                    version = next(self._evictable(kind, None))
                    self._leave(
                        version, 0 if self._whole else self._level_without[version.level, kind], evicted
                    )
            blocks.set_capacity(capacity)
            for version in list(self._resident.values()):
                if kinds := blocks.leaving(version.indices):
                    self._move(blocks, version, kinds, evicted)
            blocks.fit_memory()

    def close(self) -> None:
        """Evicts every expert and frees the memory. Idempotent.

        Raises:
            ValueError: experts are leased or reserved.
            BufferError: a buffer of a block is still exported.
        """
        with self._lock:
            self._require_unpinned()
            for key in list(self._resident):
                self._replace(key, None)
            self._blocks.close()

    # The methods below are called with the lock held.

    def _require_unpinned(self) -> None:
        if self._leases or self._pending:
            counts = f"{len(self._leases)} leases and {len(self._pending)} reservations"
            raise ValueError(f"{self.name}: expected none leased or reserved, got {counts}")

    def _leave(self, version: _Version, level: int, evicted: Callable[[Victim], None]) -> None:
        """Demotes an expert whose blocks are wanted for other purposes."""
        if level == 0:
            evicted(Victim(version.key, version.level, version.blocks))
        self._demote(version, level)

    def _move(
        self,
        blocks: SharedBlocks | Pool,
        version: _Version,
        kinds: Sequence[str],
        evicted: Callable[[Victim], None],
    ) -> None:
        """Copies blocks of some kinds to places that stay; where there is none the expert leaves."""
        indices = blocks.relocate(version.indices, kinds)
        if indices is None:
            self._leave(version, 0, evicted)
            return
        views = blocks.views(indices)
        for kind in kinds:
            views[kind][:] = version.blocks[kind]
        self._replace(version.key, _Version(version.key, version.level, indices, views, version.arriving))

    def _plan(self, key: ExpertKey, needed: Sequence[str]) -> tuple[dict[_Version, int], Indices] | None:
        """Chooses the victims that free one block of each needed kind. Changes nothing.

        A reservation needs one block of a kind and an eviction only frees more, so kinds are independent and a choice
        is found wherever one exists. Kinds come in the order in which a victim's loss of one frees others: those above
        it, and under a policy of whole experts those below it as well.

        Returns:
            victim -> the level left of it, and the needed blocks that this frees; None: too many are leased or
            reserved.
        """
        if not isinstance(self._blocks, SharedBlocks):
            return self._plan_in_pool(self._blocks, key, needed)
        losers: dict[_Version, int] = {}
        yielded: Indices = {}
        if not set(needed) <= set(self._blocks.kinds):
            return None
        for kind in self._victims_kinds:
            if kind not in needed or kind in yielded or self._blocks.room((kind,)):
                continue
            version = next(self._evictable(kind, key), None)
            if version is None:
                return None
            left = losers[version] = 0 if self._whole else self._level_without[version.level, kind]
            for lost in version.indices.keys() - self._names[left]:
                if lost in needed and self._blocks.sole(lost, version.indices[lost]):
                    yielded.setdefault(lost, version.indices[lost])
        return losers, yielded

    def _plan_in_pool(
        self, pool: Pool | FixedPlaces, key: ExpertKey, needed: Sequence[str]
    ) -> tuple[dict[_Version, int], Indices] | None:
        """Chooses victims, which lose everything, until the pool has a place for each needed kind; as `_plan`."""
        losers: dict[_Version, int] = {}
        if not set(needed) <= set(pool.kinds):
            return None
        candidates = self._evictable(pool.kinds[0], key)
        while (places := pool.place(key, needed, [version.indices for version in losers])) is None:
            version = next(candidates, None)
            if version is None:
                return None
            losers[version] = 0
        return losers, places

    def _evictable(self, kind: str, key: ExpertKey | None) -> Iterator[_Version]:
        """Yields candidates, other than `key`, whose block of a kind has no other reference; a marked one twice."""
        for candidate in self._candidates(kind):
            version = self._resident[candidate]
            index = version.indices.get(kind)
            if index is None or version.pins or candidate == key:
                continue
            if self._blocks.sole(kind, index):
                yield version

    def _candidates(self, kind: str) -> Iterator[ExpertKey]:
        """Residents that have had a block of a kind: marked ones, the policy's order, those that are last."""
        order = chain(reversed(self._first), self._policies[kind].candidates())
        return self._last_behind(order) if self._last else order

    def _last_behind(self, order: Iterable[ExpertKey]) -> Iterator[ExpertKey]:
        """Yields keys in an order, those that are evicted last behind the others."""
        last = []
        for candidate in order:
            if candidate in self._last:
                last.append(candidate)
            else:
                yield candidate
        yield from last

    def _demote(self, version: _Version, level: int) -> None:
        """Keeps the planes of `version` that `level` needs."""
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
        """Makes `version`, whose blocks have their references, the resident one; None: none is resident."""
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
            some = []
            for key in keys:
                if kind in versions[key].indices:
                    some.append(key)
            if some:
                policy.used(some)

    def _lease(self, version: _Version) -> Lease:
        version.pins += 1
        _drop_done(version)
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
            raise ValueError(f"{self.name}: expected a reservation that has not ended, on {reservation.key}")
        return self._pending.pop(reservation.key)

    def _drop_references(self, pending: _Pending) -> None:
        """Drops every reference of a reservation."""
        self._blocks.forget(pending.indices)
        for version in pending.victims:
            self._unpin(version)
        if pending.reservation.held:
            self._release((pending.reservation.held,))


def _drop_done(version: _Version) -> None:
    """Drops the events of copies that are done."""
    if version.arriving:
        version.arriving = tuple(event for event in version.arriving if not event.done())
