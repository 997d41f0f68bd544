"""Values of the cache, and the contract of eviction: a tier (`plane_tier`) keeps experts as blocks and leases them out.

A tier is the same in any memory: a preallocated arena for each kind of block, a table of resident experts, and eviction
policies. It knows experts by key and level (8, 4, 2), not by model.

Invariants of a tier:
  - every block is either free or referenced, and only `resize` changes their number, while none is leased;
  - a lease sees complete planes only, and its blocks are neither written nor reused until its release;
  - the level of a resident expert is a prefix of planes (there is no 8 without 4).

Threads: every method of a tier may be called from any thread; each takes the tier's lock for some microseconds and does
no I/O. In the program only the engine's thread changes a tier, except while it fills free blocks between two requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from edgemoe.machine.device import Event
from edgemoe.storage.base import Blocks, ExpertKey

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
        arriving: events that are recorded after the copies that still fill the blocks; empty in RAM.
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
        lease: a lease on the planes of the expert that this tier already has (a promotion); None: it has none. The tier
            releases it with the reservation.
        victims: experts evicted to make room, for a slower tier to keep. Valid until `into` is written.
    """

    key: ExpertKey
    level: int
    into: Blocks
    lease: Lease | None
    victims: tuple[Victim, ...]


class Acquired(NamedTuple):
    """The answer of PlaneTier.acquire_all.

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


class EvictionPolicy(ABC):
    """Orders resident experts by how soon they are evicted. Not thread-safe: its tier calls it under its lock.

    A tier has one policy for each kind of block, which sees the experts that have such a block. Unless `whole`, a
    victim loses its top planes first and no more than is needed.

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
    """Whether a victim loses everything at once."""
    pooled: ClassVar[bool] = False
    """Whether blocks of all kinds share one pool of bytes, and the policy of the lowest kind chooses every victim."""
    counts_predictions: ClassVar[bool] = True
    """Whether a prediction of a resident expert counts as its use."""

    @abstractmethod
    def used(self, keys: Iterable[ExpertKey]) -> None:
        """Counts a use of each resident key: requested at its level, below it, or above it (a partial miss).

        Raises:
            KeyError: a key is not resident.
        """

    @abstractmethod
    def arrived(self, key: ExpertKey) -> None:
        """Blocks of `key` were published: all of its blocks, or a promotion's in addition to resident ones."""

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

    def heat(self) -> dict[ExpertKey, float]:
        """Returns how hot each expert is, above 0, at most 1; experts that are not resident may be missing.

        Here the first to be evicted is the coldest.
        """
        keys = list(self.candidates())
        return {key: place / len(keys) for place, key in enumerate(keys, start=1)}
