"""A tier of planes: one memory that keeps experts in blocks, leases them out and takes others in.

Its parts: `blocks` (or `pool`, `fixed_places`) are the memory, `residents` the experts in it, each in one `version`,
and `eviction` says which of them leave for others. The tier has the lock, and takes it for each of its methods.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from edgemoe.cache.arena import in_ram
from edgemoe.cache.base import Acquired, EvictionPolicy, Lease, Observer, Reservation
from edgemoe.cache.blocks import Arenas, SharedBlocks
from edgemoe.cache.eviction import Eviction
from edgemoe.cache.fixed_places import FixedPlaces
from edgemoe.cache.level_kinds import LevelKinds
from edgemoe.cache.pool import Pool
from edgemoe.cache.residents import Residents
from edgemoe.cache.resize import Evicted, resize
from edgemoe.cache.version import TierBlocks, Version
from edgemoe.machine.device import Event
from edgemoe.storage.base import ExpertKey, ResidentForm


class PlaneTier:
    """One memory tier, with one lock, which every method takes for some microseconds, `reserve` for its search as well.

    Args:
        form: the form of experts in this tier, and in any tier that they move to.
        capacity: block kind's name -> blocks; an absent kind has none.
        policy: makes a policy; called once for each kind of block.
        device: the memory that the blocks lie in, for leases.
        name: names the tier in messages.
        arenas: allocates the memory.
        places: a place for each expert's block, instead of blocks of `capacity` and `arenas`.

    Attributes:
        kinds: the kinds of the form, by level.
        blocks: the memory.
        residents: the experts in it, and their leases and reservations.
        eviction: the order of eviction.

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
        self.name, self._form = name, form
        policies = {kind.name: policy() for kind in form.kinds}
        pooled = any(each.pooled for each in policies.values())
        self.kinds = LevelKinds(form)
        self.blocks: TierBlocks = places or (Pool if pooled else SharedBlocks)(form.kinds, capacity, arenas)
        self._versions: dict[ExpertKey, Version] = {}
        self.eviction = Eviction(self.kinds, policies, self.blocks, self._versions)
        self.residents = Residents(name, device, self.kinds, self.blocks, self.eviction, self._versions)
        self._lock = threading.Lock()

    def level_of(self, key: ExpertKey) -> int:
        """Returns the resident level, 0 if none. Does not count as a use."""
        with self._lock:
            version = self._versions.get(key)
            return version.level if version else 0

    def free_experts(self, level: int) -> int:
        """Returns how many more experts, whole at `level`, fit without an eviction; 0 for what is no level."""
        with self._lock:
            names = self.kinds.names.get(level, ())
            if not names or not set(names) <= set(self.blocks.kinds):
                return 0
            return self.blocks.room(names)

    def mark_evict_first(self, keys: Sequence[ExpertKey]) -> None:
        """Marks resident `keys` as the first eviction candidates, most recent call first.

        A mark ends when its expert is used, or with clear_evict_first.
        """
        with self._lock:
            self.eviction.mark_first(keys)

    def clear_evict_first(self) -> None:
        """Ends every mark of mark_evict_first."""
        with self._lock:
            self.eviction.first.clear()

    def set_evict_last(self, keys: Iterable[ExpertKey]) -> None:
        """Makes these experts the last eviction candidates, in the policy's order; replaces an earlier set."""
        with self._lock:
            self.eviction.last = frozenset(keys)

    def resident(self) -> dict[ExpertKey, int]:
        """Returns a snapshot of key -> level."""
        with self._lock:
            return {key: version.level for key, version in self._versions.items()}

    def heat(self) -> dict[ExpertKey, float]:
        """Returns how hot each expert is by the policy of the base planes (EvictionPolicy.heat)."""
        with self._lock:
            return self.eviction.heat()

    def observe(self, observer: Observer) -> None:
        """Calls `observer` for every resident expert now, and whenever an expert arrives, changes its level or goes.

        The calls come from the thread that changes the tier, under its lock: the observer must not call the tier. Until
        the next change of the tier the blocks of an observed expert are neither written nor reused.
        """
        with self._lock:
            self.residents.observe(observer)

    def arriving(self, keys: Iterable[ExpertKey]) -> list[Event]:
        """Returns the events that are recorded after copies that still fill blocks of resident `keys`."""
        with self._lock:
            return [event for key in keys for event in self.residents.arriving(self._versions[key])]

    def acquire(self, key: ExpertKey, level: int) -> Lease | None:
        """Leases the expert if it is resident at `level` or above; None otherwise.

        A higher resident level is a hit and is used as it is (conservative reuse). Whatever is resident counts as used,
        on a partial miss too: an expert about to be promoted must not be evicted for others first.
        """
        leases = self.acquire_all({key: level}).hits
        return leases[0] if leases else None

    def acquire_all(self, levels: Mapping[ExpertKey, int], *, predicted: bool = False) -> Acquired:
        """Does what `acquire` does for several experts at once, in the order of their keys.

        Args:
            levels: key -> level.
            predicted: they are not requested yet: a use only where the policy counts predictions.
        """
        acquired = Acquired([], [], [])
        with self._lock:
            resident = []
            for key in sorted(levels):
                version = self._versions.get(key)
                if version is None:
                    acquired.missing.append(key)
                    continue
                resident.append(key)
                if version.level >= levels[key]:
                    acquired.hits.append(self.residents.lease(version))
                else:
                    acquired.partial.append(key)
            self.eviction.used(resident, predicted=predicted)
        return acquired

    def mark_used(self, keys: Sequence[ExpertKey]) -> None:
        """Counts experts as used, in this order, as leasing them would; keys that are not resident are ignored."""
        with self._lock:
            self.eviction.used([key for key in keys if key in self._versions])

    def release(self, *leases: Lease) -> None:
        """Ends leases.

        Raises:
            ValueError: one has ended.
        """
        with self._lock:
            self.residents.release(leases)

    def reserve(
        self, key: ExpertKey, level: int, *, keep_victims: bool = True, evict: bool = True
    ) -> Reservation | None:
        """Sets blocks aside that bring `key` to `level`, evicting experts that are not leased.

        Only missing blocks are reserved (promotion). The caller owns the reservation and ends it.

        Args:
            key: the expert.
            level: the level that the expert reaches, above its present one.
            keep_victims: lists the evicted, whose other blocks stay as they are until the reservation ends; False:
                those are free at once, and none is listed.
            evict: False takes free blocks only.

        Returns:
            None, with nothing changed, while too many blocks are leased or reserved.

        Raises:
            ValueError: the key has a reservation, is resident at the level already, or it is no level.
        """
        with self._lock:
            held = self._versions.get(key)
            before, pending = held.level if held else 0, key in self.residents.pending
            if pending or level not in self.kinds.names or level <= before:
                wanted = f"a level above {before}{' and reserved' if pending else ''} for {key}"
                raise ValueError(f"{self.name}: expected {wanted}, got {level}")
            victims = self.eviction.victims(key, self.kinds.rewritten[before, level])
            if victims is None or (victims[0] and not evict):
                return None
            return self.residents.reserve(key, level, *victims, keep=keep_victims)

    def publish(self, reservation: Reservation, event: Event | None = None) -> Lease:
        """Makes the filled blocks visible in one step and leases them to the caller. Ends the reservation.

        Args:
            reservation: a reservation of this tier that has not ended.
            event: recorded after the device's copies that fill the blocks; leases carry it until it is done.

        Raises:
            ValueError: the reservation has ended.
        """
        with self._lock:
            version = self.residents.publish(reservation, (event,) if event else ())
            return self.residents.lease(version)

    def abandon(self, reservation: Reservation) -> None:
        """Frees the reserved blocks. Ends the reservation; planes resident before stay, victims do not come back.

        Raises:
            ValueError: the reservation has ended.
        """
        with self._lock:
            self.residents.abandon(reservation)

    def drop(self, key: ExpertKey, level: int = 0) -> None:
        """Demotes the expert to `level`; 0 evicts it. Leased blocks become free on their release.

        Frees whole blocks and changes none, so it stops at ResidentForm.demoted. Without effect on an expert that is
        not resident above `level`.
        """
        with self._lock:
            version = self._versions.get(key)
            if version and level < version.level:
                self.residents.demote(version, self._form.demoted(version.level, level))

    def resize(self, capacity: Mapping[str, int], on_evict: Evicted = lambda victim: None) -> None:
        """Changes the number of blocks, and takes or returns their memory.

        Experts without a block leave in the order of eviction, whole or in part; others keep their planes, some of them
        in other blocks, and observers see these.

        Args:
            capacity: kind's name -> blocks, at most as many as the tier began with.
            on_evict: called with every expert that leaves whole, while its blocks are as they were; it must not call
                this tier.

        Raises:
            ValueError: experts are leased or reserved, or have places of their own; nothing has changed.
        """
        blocks = self.blocks
        if isinstance(blocks, FixedPlaces):
            raise ValueError(f"{self.name}: expected blocks for any expert, got a place for each")
        with self._lock:
            self.residents.require_unpinned()
            resize(blocks, self.residents, self.eviction, capacity, on_evict)

    def close(self) -> None:
        """Evicts every expert and frees the memory. Idempotent.

        Raises:
            ValueError: experts are leased or reserved.
            BufferError: a buffer of a block is still exported.
        """
        with self._lock:
            self.residents.require_unpinned()
            for version in list(self._versions.values()):
                self.residents.demote(version, 0)
            self.blocks.close()
