"""lru-planes: evicts from the least recently used expert first, its top planes before the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from cache.base import EvictionPolicy
from storage.base import ExpertKey


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
