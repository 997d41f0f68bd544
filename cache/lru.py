"""lru-planes: the least recently used expert gives up first, its top planes before the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from cache.base import EvictionPolicy
from storage.base import ExpertKey


class LRU(EvictionPolicy):
    """One entry per expert, whatever its level. Every operation takes constant time."""

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()

    def used(self, key: ExpertKey) -> None:
        """See EvictionPolicy. Raises KeyError for a key that is not resident."""
        self._order.move_to_end(key)

    def arrived(self, key: ExpertKey) -> None:
        """See EvictionPolicy. Counts as a use, so that what was read is not gone before it is computed."""
        self._order[key] = None
        self._order.move_to_end(key)

    def forgotten(self, key: ExpertKey) -> None:
        """See EvictionPolicy."""
        del self._order[key]

    def candidates(self) -> Iterator[ExpertKey]:
        """See EvictionPolicy."""
        return iter(self._order)
