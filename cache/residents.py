"""The resident and arriving experts of a tier: versions, and the leases and reservations that pin them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgemoe.cache.base import Lease, Observer, Reservation, Victim
from edgemoe.cache.blocks import Indices
from edgemoe.cache.eviction import Eviction
from edgemoe.cache.level_kinds import LevelKinds
from edgemoe.cache.version import TierBlocks, Version
from edgemoe.machine.device import Event
from edgemoe.storage.base import ExpertKey


@dataclass(eq=False, slots=True)
class Pending:
    """A reservation, and the blocks and leases that it has until it ends."""

    reservation: Reservation
    indices: Indices
    leases: Sequence[Lease]


class Residents:
    """Puts versions in the place of others, and counts what pins them. Not thread-safe: the tier that owns it locks.

    Args:
        name: names the tier in messages.
        device: the memory that the blocks lie in, for leases.
        kinds: the kinds of the tier's form, by level.
        blocks: the blocks of the tier, in which every version and every reservation has references.
        eviction: the order of eviction, which sees every change.
        versions: resident expert -> its version; only this changes it.

    Attributes:
        leases: lease that has not ended -> the version that it pins; leases of reservations included.
        pending: expert -> its reservation that has not ended.
    """

    def __init__(
        self,
        name: str,
        device: str,
        kinds: LevelKinds,
        blocks: TierBlocks,
        eviction: Eviction,
        versions: dict[ExpertKey, Version],
    ) -> None:
        self._name, self._device, self.versions = name, device, versions
        self._kinds, self._blocks, self._eviction = kinds, blocks, eviction
        self.leases: dict[Lease, Version] = {}
        self.pending: dict[ExpertKey, Pending] = {}
        self._observers: list[Observer] = []

    def observe(self, observer: Observer) -> None:
        """Calls `observer` for every resident expert now, and for each at every change."""
        self._observers.append(observer)
        for version in self.versions.values():
            observer(version.key, version.level, version.blocks)

    def replace(self, key: ExpertKey, version: Version | None) -> None:
        """Makes `version`, whose blocks have their references already, the resident one; None: none is resident."""
        old = self.versions.pop(key, None)
        if version:
            self.versions[key] = version
        for observer in self._observers:
            observer(key, version.level if version else 0, version.blocks if version else {})
        if old is None:
            return
        if version is None:
            self._eviction.first.pop(key, None)
        for kind in old.indices:
            if version is None or kind not in version.indices:
                self._eviction.policies[kind].forgotten(key)
        if not old.pins:
            self._blocks.forget(old.indices)

    def demote(self, version: Version, level: int) -> None:
        """Keeps the planes of a resident version that a lower level needs; 0: none."""
        if level == version.level:
            return
        if level == 0:
            self.replace(version.key, None)
            return
        indices, blocks = {}, {}
        for kind in self._kinds.names[level]:
            indices[kind], blocks[kind] = version.indices[kind], version.blocks[kind]
        self._blocks.refer(indices)
        self.replace(version.key, Version(version.key, level, indices, blocks, version.arriving))

    def arriving(self, version: Version) -> tuple[Event, ...]:
        """The events of copies that still fill the blocks; drops the events of copies that are done."""
        if version.arriving:
            version.arriving = tuple(event for event in version.arriving if not event.done())
        return version.arriving

    def lease(self, version: Version) -> Lease:
        """Pins a version for as long as the lease lasts."""
        version.pins += 1
        arriving = self.arriving(version) if version.arriving else ()
        lease = Lease(version.key, version.level, version.blocks, self._device, arriving)
        self.leases[lease] = version
        return lease

    def release(self, leases: Sequence[Lease]) -> None:
        """Ends leases. A version without any, which is not resident either, gives up its blocks.

        Raises:
            ValueError: one has ended; those before it end now.
        """
        for lease in leases:
            version = self.leases.pop(lease, None)
            if version is None:
                raise ValueError(f"{self._name}: expected a lease that has not ended, on {lease.key}")
            version.pins -= 1
            if not version.pins and self.versions.get(version.key) is not version:
                self._blocks.forget(version.indices)

    def reserve(
        self, key: ExpertKey, level: int, losers: dict[Version, int], indices: Indices, *, keep: bool
    ) -> Reservation:
        """Evicts the losers, takes blocks and opens a reservation of them.

        Args:
            key: the expert to bring.
            level: bits at which it will be resident.
            losers: victim -> the level left of it.
            indices: blocks of victims that the expert takes; blocks of the other kinds are free.
            keep: whether victims stay as they are until the reservation ends.
        """
        held = self.versions.get(key)
        # Before the victims go: the blocks that they yield are not free in between.
        indices = self._blocks.take(self._kinds.rewritten[held.level if held else 0, level], indices)
        victims, leases = list[Victim](), list[Lease]()
        for version, left in losers.items():
            if keep:
                victims.append(Victim(version.key, version.level, version.blocks))
                leases.append(self.lease(version))
            if left:
                self.demote(version, left)
            else:
                self.replace(version.key, None)
        lease = self.lease(held) if held else None
        if lease:
            leases.append(lease)
        reservation = Reservation(key, level, self._blocks.views(indices), lease, tuple(victims))
        self.pending[key] = Pending(reservation, indices, leases)
        return reservation

    def publish(self, reservation: Reservation, events: tuple[Event, ...]) -> Version:
        """Makes a reservation's expert resident with its blocks, and ends the reservation.

        Args:
            reservation: a reservation that has not ended.
            events: events after the copies that fill the reserved blocks.

        Raises:
            ValueError: it has ended.
        """
        pending, key, level = self._end(reservation), reservation.key, reservation.level
        # The version takes the references of the reserved blocks over, and shares the blocks that the expert has.
        indices, blocks = pending.indices, reservation.into
        if reservation.lease:
            held, names = self.leases[reservation.lease], self._kinds.names[level]
            self._blocks.refer({kind: held.indices[kind] for kind in names if kind not in indices})
            whole, views = held.indices | indices, held.blocks | blocks
            indices, blocks = {kind: whole[kind] for kind in names}, {kind: views[kind] for kind in names}
            events = held.arriving + events
        version = Version(key, level, indices, blocks, events)
        self.replace(key, version)
        for kind in indices:
            self._eviction.policies[kind].arrived(key)
        if pending.leases:
            self.release(pending.leases)
        return version

    def abandon(self, reservation: Reservation) -> None:
        """Ends a reservation and frees its blocks.

        Raises:
            ValueError: it has ended.
        """
        pending = self._end(reservation)
        self._blocks.forget(pending.indices)
        self.release(pending.leases)

    def require_unpinned(self) -> None:
        """Raises ValueError while experts are leased or reserved."""
        if self.leases or self.pending:
            counts = f"{len(self.leases)} leases and {len(self.pending)} reservations"
            raise ValueError(f"{self._name}: expected none leased or reserved, got {counts}")

    def _end(self, reservation: Reservation) -> Pending:
        pending = self.pending.get(reservation.key)
        if pending is None or pending.reservation is not reservation:
            raise ValueError(f"{self._name}: expected a reservation that has not ended, on {reservation.key}")
        return self.pending.pop(reservation.key)
