"""Contracts of the cache: a tier keeps experts as blocks, hands out leases, and evicts the least useful experts.

A tier is the same in any memory: a preallocated arena for each kind of block, a table of resident experts, and eviction
policies. It knows experts by key and level (8, 4, 2), not by model.

Invariants, verified by `check_integrity`:
  - every block is either free or referenced, and an arena never changes its size;
  - a lease sees complete planes only, and its blocks are neither written nor reused until its release;
  - the level of a resident expert is a prefix of planes (there is no 8 without 4).

Threads: every method of a tier may be called from any thread; each takes the tier's lock for some microseconds and does
no I/O. In the program only the engine's thread changes a tier, except while it fills free blocks between two requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from storage.base import Blocks, ExpertKey
from storage.device import Event

Observer = Callable[[ExpertKey, int, Blocks], None]
"""Called with an expert, its resident level and its blocks; level 0 and no blocks once it is not resident."""


@dataclass(frozen=True, eq=False)
class Lease:
    """The right to compute from a resident expert, until its tier releases it, exactly once.

    >>> lease = Lease(ExpertKey(layer=3, expert=7), level=4, blocks={}, device="cpu")
    >>> lease.key.expert, lease.arriving
    (7, ())

    Args:
        key: the expert.
        level: the resident level, at least the requested one.
        blocks: its resident blocks. The tier owns them; the lease keeps them from being written or reused.
        device: the memory that blocks lie in.
        arriving: events behind the copies that still fill the blocks; in RAM there are none.
    """

    key: ExpertKey
    level: int
    blocks: Blocks
    device: str
    arriving: tuple[Event, ...] = ()


@dataclass(frozen=True, eq=False)
class Victim:
    """An expert that was evicted to free blocks, whole or in part, in its state before.

    Its blocks keep their bytes until the reservation's own blocks are written or the reservation ends.
    """

    key: ExpertKey
    level: int
    blocks: Blocks


@dataclass(frozen=True, eq=False)
class Reservation:
    """Blocks set aside for an expert on its way in. Ends in exactly one publish or abandon.

    Args:
        key: the expert.
        level: the level that will be complete on publish.
        into: the new blocks, written by the reservation's owner alone.
        held: a lease on the planes of the expert that this tier already has (a promotion); None: it has none. The tier
            releases it with the reservation.
        victims: what was evicted for it, for a slower tier to keep. Valid until `into` is written.
    """

    key: ExpertKey
    level: int
    into: Blocks
    held: Lease | None
    victims: tuple[Victim, ...]


class Acquired(NamedTuple):
    """The answer of Tier.acquire_all.

    >>> Acquired(hits=[], partial=[], missing=[ExpertKey(0, 1)]).missing
    [ExpertKey(layer=0, expert=1)]

    Args:
        hits: a lease on each expert that is resident at its level or above.
        partial: experts that are resident below their level.
        missing: experts that are not resident.
    """

    hits: list[Lease]
    partial: list[ExpertKey]
    missing: list[ExpertKey]


class Tier(ABC):
    """One memory tier. See the module for threads."""

    @abstractmethod
    def level_of(self, key: ExpertKey) -> int:
        """Returns the resident level, 0 if none. Does not count as a use."""

    @abstractmethod
    def acquire(self, key: ExpertKey, level: int) -> Lease | None:
        """Leases the expert if it is resident at `level` or above; None otherwise.

        A higher resident level is a hit and is used as it is (conservative reuse). Whatever is resident counts as used,
        on a partial miss too: an expert about to be promoted must not be evicted for others first.
        """

    @abstractmethod
    def acquire_all(self, wanted: Mapping[ExpertKey, int]) -> Acquired:
        """Does what `acquire` does for several experts at once, in the order of their keys."""

    @abstractmethod
    def mark_used(self, keys: Sequence[ExpertKey]) -> None:
        """Counts resident experts as used, in this order, as leasing them would."""

    @abstractmethod
    def observe(self, observer: Observer) -> None:
        """Calls `observer` for every resident expert now, and whenever an expert arrives, changes its level or goes.

        The calls come from the thread that changes the tier, under its lock: the observer must not call the tier. Until
        the next change of the tier the blocks of an observed expert are neither written nor reused.
        """

    @abstractmethod
    def reserve(self, key: ExpertKey, level: int) -> Reservation | None:
        """Sets blocks aside that bring `key` to `level`, evicting experts that are not leased.

        Only missing blocks are reserved (promotion). The caller owns the reservation and ends it.

        Returns:
            None, with nothing changed, while too many blocks are leased or reserved.

        Raises:
            ValueError: the key has a reservation, is resident at the level already, or it is no level.
        """

    @abstractmethod
    def publish(self, reservation: Reservation, arriving: Event | None = None) -> Lease:
        """Makes the filled blocks visible in one step and leases them to the caller. Ends the reservation.

        Args:
            reservation: of this tier.
            arriving: behind the device's copies that fill the blocks; leases carry it until it is done.

        Raises:
            ValueError: the reservation has ended.
        """

    @abstractmethod
    def abandon(self, reservation: Reservation) -> None:
        """Frees the reserved blocks. Ends the reservation; planes resident before stay, victims do not come back.

        Raises:
            ValueError: the reservation has ended.
        """

    @abstractmethod
    def release(self, *leases: Lease) -> None:
        """Ends leases.

        Raises:
            ValueError: one has ended.
        """

    @abstractmethod
    def drop(self, key: ExpertKey, level: int = 0) -> None:
        """Demotes the expert to `level`; 0 evicts it. Leased blocks become free on their release.

        Frees whole blocks and changes none, so it stops at ResidentForm.demoted. Without effect on an expert that is
        not resident above `level`.
        """

    @abstractmethod
    def free_experts(self, level: int) -> int:
        """Returns how many more experts, whole at `level`, fit without an eviction; 0 for what is no level."""

    @abstractmethod
    def mark_evict_first(self, keys: Sequence[ExpertKey]) -> None:
        """Marks resident `keys` as the first eviction candidates, most recent call first.

        A mark ends when its expert is used, or with clear_evict_first.
        """

    @abstractmethod
    def clear_evict_first(self) -> None:
        """Ends every mark of mark_evict_first."""

    @abstractmethod
    def resident(self) -> dict[ExpertKey, int]:
        """Returns a snapshot of key -> level."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises AssertionError if an invariant of this module does not hold. For tests."""


class EvictionPolicy(ABC):
    """Orders resident experts by how soon they are evicted. Not thread-safe: its tier calls it under its lock.

    A tier has one policy for each kind of block, which sees the experts that have such a block. With `whole` False a
    victim loses its top planes first and no more than is needed; with True it loses everything at once.

    >>> class First(EvictionPolicy):
    ...     '''Evicts the first expert that arrived.'''
    ...     def __init__(self): self.keys = []
    ...     def used(self, keys): pass
    ...     def arrived(self, key): self.keys.append(key) if key not in self.keys else None
    ...     def forgotten(self, key): self.keys.remove(key)
    ...     def candidates(self): return iter(list(self.keys))
    >>> policy = First()
    >>> policy.arrived(ExpertKey(0, 1)), next(policy.candidates())
    (None, ExpertKey(layer=0, expert=1))
    """

    whole: ClassVar[bool] = False

    @abstractmethod
    def used(self, keys: Iterable[ExpertKey]) -> None:
        """Counts a use of each resident key: requested at its level, below it, or above it (a partial miss).

        Raises:
            KeyError: a key is not resident.
        """

    @abstractmethod
    def arrived(self, key: ExpertKey) -> None:
        """Blocks of `key` were published: all of its blocks, or a promotion's beside resident ones."""

    @abstractmethod
    def forgotten(self, key: ExpertKey) -> None:
        """`key` is not resident any more.

        Raises:
            KeyError: it was not.
        """

    @abstractmethod
    def candidates(self) -> Iterator[ExpertKey]:
        """Yields resident keys, the first to be evicted first.

        The tier takes the first that it can evict, changes nothing while it iterates, and iterates once at a time.
        """
