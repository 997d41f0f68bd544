"""Eviction from the least recently used expert first.

lru-planes: its top planes before the rest. lru-experts and lru-pool: all of it (DyMoE section 4.4.2).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from edgemoe.cache.base import EvictionPolicy
from edgemoe.storage.base import ExpertKey


class LRU(EvictionPolicy):
    """Keeps one entry per expert, at any level. Every operation takes constant time."""

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()

    def used(self, keys: Iterable[ExpertKey]) -> None:
        """Moves keys to the end of the order; KeyError for one that is not resident."""
        for key in keys:
            self._order.move_to_end(key)

    def arrived(self, key: ExpertKey) -> None:
        """Counts as a use, so that an expert is not evicted between its read and its computation."""
        self._order[key] = None
        self._order.move_to_end(key)

    def forgotten(self, key: ExpertKey) -> None:
        """Removes a key; KeyError if it is not resident."""
        del self._order[key]

    def candidates(self) -> Iterator[ExpertKey]:
        """Yields the least recently used key first."""
        return iter(self._order)


class WholeLRU(LRU):
    """LRU in which an expert is cached in one form or not at all; every kind of block has bytes of its own."""

    whole = True


class PooledLRU(WholeLRU):
    """The paper's cache: experts of all levels share one pool of bytes, and only requests and arrivals are uses."""

    pooled = True
    counts_predictions = False
