"""The experts in a tier, and those on their way into it: versions, and the leases and reservations that pin them."""

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
    """A reservation, and the blocks and versions that it refers to until it ends."""

    reservation: Reservation
    indices: Indices
    victims: Sequence[Version]


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
        leases: lease that has not ended -> the version that it pins.
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

    def put(self, key: ExpertKey, level: int, indices: Indices, arriving: tuple[Event, ...]) -> Version:
        """Makes another version resident, whose blocks have their references already.

        Args:
            key: the expert.
            level: the level that the blocks make.
            indices: kind's name -> index of the block.
            arriving: events after the copies that still fill the blocks.
        """
        version = Version(key, level, indices, self._blocks.views(indices), arriving)
        self._replace(key, version)
        return version

    def demote(self, version: Version, level: int) -> None:
        """Keeps the planes of a resident version that a lower level needs; 0: none."""
        if level == version.level:
            return
        if level == 0:
            self._replace(version.key, None)
            return
        indices = {kind: version.indices[kind] for kind in self._kinds.names[level]}
        self._blocks.refer(indices)
        self.put(version.key, level, indices, version.arriving)

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
        """Ends leases.

        Raises:
            ValueError: one has ended.
        """
        for lease in leases:
            version = self.leases.pop(lease, None)
            if version is None:
                raise ValueError(f"{self._name}: expected a lease that has not ended, on {lease.key}")
            self._unpin(version)

    def reserve(
        self, key: ExpertKey, level: int, losers: dict[Version, int], indices: Indices, *, keep: bool
    ) -> Reservation:
        """Evicts the losers, takes blocks and opens a reservation of them.

        Args:
            key, level: as for PlaneTier.reserve.
            losers: victim -> the level left of it.
            indices: blocks of victims that the expert takes; blocks of the other kinds are free.
            keep: whether victims stay as they are until the reservation ends.
        """
        held = self.versions.get(key)
        for version, left in losers.items():
            version.pins += 1
            self.demote(version, left)
        indices = self._blocks.take(self._kinds.rewritten[held.level if held else 0, level], indices)
        victims: list[Victim] = []
        for version in losers:
            if keep:
                victims.append(Victim(version.key, version.level, version.blocks))
            else:
                self._unpin(version)
        lease = self.lease(held) if held else None
        reservation = Reservation(key, level, self._blocks.views(indices), lease, tuple(victims))
        self.pending[key] = Pending(reservation, indices, list(losers) if keep else ())
        return reservation

    def publish(self, reservation: Reservation, arriving: tuple[Event, ...]) -> Version:
        """Makes a reservation's expert resident with its blocks, and ends the reservation.

        Args:
            reservation: a reservation that has not ended.
            arriving: events after the copies that fill the reserved blocks.

        Raises:
            ValueError: it has ended.
        """
        pending = self._end(reservation)
        have = pending.indices
        if reservation.held:
            held = self.leases[reservation.held]
            have, arriving = held.indices | have, held.arriving + arriving
        indices = {}
        for kind in self._kinds.names[reservation.level]:
            indices[kind] = have[kind]
        self._blocks.refer(indices)
        version = self.put(reservation.key, reservation.level, indices, arriving)
        self._eviction.arrived(version)
        self._drop_references(pending)
        return version

    def abandon(self, reservation: Reservation) -> None:
        """Ends a reservation and frees its blocks.

        Raises:
            ValueError: it has ended.
        """
        self._drop_references(self._end(reservation))

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

    def _drop_references(self, pending: Pending) -> None:
        self._blocks.forget(pending.indices)
        for version in pending.victims:
            self._unpin(version)
        if pending.reservation.held:
            self.release((pending.reservation.held,))

    def _unpin(self, version: Version) -> None:
        """Takes a pin from a version; without any, and not resident, it gives up its blocks."""
        version.pins -= 1
        if not version.pins and self.versions.get(version.key) is not version:
            self._blocks.forget(version.indices)

    def _replace(self, key: ExpertKey, version: Version | None) -> None:
        """Makes `version` the resident one; None: none is resident."""
        old = self.versions.pop(key, None)
        if version:
            self.versions[key] = version
        for observer in self._observers:
            observer(key, version.level if version else 0, version.blocks if version else {})
        if old:
            self._eviction.forgotten(old, version)
            if not old.pins:
                self._blocks.forget(old.indices)
