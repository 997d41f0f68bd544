"""Contracts of the cache: a tier holds experts as blocks, hands out leases, and forgets the least useful.

A tier is the same thing whatever memory it lies in: a preallocated arena per block kind, a table of
resident experts, an eviction policy. It knows experts by key and by level (8, 4, 2), not what a model is.

What always holds, and `check_integrity` verifies:
  - every block is either free or referenced, and the arena's size never changes;
  - a lease sees complete planes only, and the blocks it sees are not written or reused until release;
  - the level of a resident expert is a prefix of planes (there is no 8 without 4).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from storage.base import Blocks, ExpertKey
from storage.device import Event


@dataclass(frozen=True, eq=False)
class Lease:
    """The right to compute from a resident expert. Valid until released, exactly once, by its tier.

    `level` is what is resident, at least what was asked for. `device` says where `blocks` lie. Their bytes are
    there once the copies of `arriving` are done; in RAM there are none.
    """

    key: ExpertKey
    level: int
    blocks: Blocks
    device: str
    arriving: tuple[Event, ...] = ()


@dataclass(frozen=True, eq=False)
class Victim:
    """What was evicted to make room, whole or in part, as it was before.

    Its blocks hold its bytes until the reservation's own are written or the reservation ends.
    """

    key: ExpertKey
    level: int
    blocks: Blocks


@dataclass(frozen=True, eq=False)
class Reservation:
    """Blocks set aside for an expert on its way in. Ends in exactly one publish or abandon.

    Args:
        key: whose blocks these are.
        level: the level that will be complete on publish.
        into: the new blocks, to be filled by the reservation's owner alone.
        held: a lease on what this tier has of the expert already (a promotion), else None. It ends with
            the reservation; nobody else releases it.
        victims: what was evicted for it, for a slower tier to keep. Valid until `into` is written.
    """

    key: ExpertKey
    level: int
    into: Blocks
    held: Lease | None
    victims: tuple[Victim, ...]


class Tier(ABC):
    """One memory tier. Thread-safe: every method may be called from any thread, and none does I/O."""

    @abstractmethod
    def level_of(self, key: ExpertKey) -> int:
        """The level resident now, 0 if none. Changes nothing, not even recency."""

    @abstractmethod
    def acquire(self, key: ExpertKey, level: int) -> Lease | None:
        """Pins the expert if it is resident at `level` or above.

        Asked level <= resident level is a hit and uses what is there (conservative reuse). Returns None
        on a miss, whole or partial. Whatever is resident counts as used, on a partial miss too: what is
        about to be promoted must not make room for others first.
        """

    @abstractmethod
    def reserve(self, key: ExpertKey, level: int) -> Reservation | None:
        """Sets blocks aside to bring `key` to `level`, evicting what is not pinned.

        Only the missing blocks are reserved (promotion). Returns None, with nothing changed, while so
        much is pinned or reserved that there is no room: release something and ask again.
        At most one reservation per key at a time; a second raises ValueError, as does a level that is
        already resident, and one that is no level.
        """

    @abstractmethod
    def publish(self, reservation: Reservation, arriving: Event | None = None) -> Lease:
        """Makes the filled blocks visible in one step, and pins them for the caller.

        Where a device's own copies fill them, `arriving` is behind these, and every lease says so until it is done.
        Ends the reservation; one that has ended already raises ValueError.
        """

    @abstractmethod
    def abandon(self, reservation: Reservation) -> None:
        """Returns the reserved blocks. What was resident before stays resident; victims do not come back.

        Ends the reservation; one that has ended already raises ValueError.
        """

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Ends a lease. A second release raises ValueError."""

    @abstractmethod
    def drop(self, key: ExpertKey, level: int = 0) -> None:
        """Demotes the expert to `level` (0: forgets it). Blocks still leased are freed on their release.

        Gives up whole blocks and changes none, so it stops at ResidentForm.demoted. Without effect on an
        expert that is not resident above `level`.
        """

    @abstractmethod
    def room(self, level: int) -> int:
        """How many more experts, whole at `level`, find room without an eviction. 0 for what is no level."""

    @abstractmethod
    def go_first(self, keys: Sequence[ExpertKey]) -> None:
        """Those of `keys` that are resident are evicted before all others, the first of them first, and before those of
        earlier calls; each until it is acquired, all until `all_alike`."""

    @abstractmethod
    def all_alike(self) -> None:
        """Ends what go_first did."""

    @abstractmethod
    def resident(self) -> dict[ExpertKey, int]:
        """A snapshot of key -> level."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant of this module does not hold. For tests; takes the lock."""


class EvictionPolicy(ABC):
    """Orders resident experts by how soon they may go. Not thread-safe: its tier calls it under its lock.

    A tier has one for each kind of block, and to it the experts that have such a block are the resident
    ones. With `whole` False a victim loses no more than is needed, its top planes first; with True it loses
    everything at once.
    """

    whole: ClassVar[bool] = False

    @abstractmethod
    def used(self, key: ExpertKey) -> None:
        """`key`, which is resident, was asked for: at its level or below, or above (a partial miss)."""

    @abstractmethod
    def arrived(self, key: ExpertKey) -> None:
        """Blocks of `key` were published: all of its own, or a promotion's beside what was resident."""

    @abstractmethod
    def forgotten(self, key: ExpertKey) -> None:
        """`key` is no longer resident. Raises KeyError if it was not."""

    @abstractmethod
    def candidates(self) -> Iterator[ExpertKey]:
        """Resident keys, the first to go first. The tier takes the first it can; it does not change
        the policy while iterating, and iterates once at a time."""
