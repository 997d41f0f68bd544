"""Least recently used goes first."""

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
        """See EvictionPolicy."""
        self._order[key] = None
        self._order.move_to_end(key)

    def forgotten(self, key: ExpertKey) -> None:
        """See EvictionPolicy. Raises KeyError for a key that was never used."""
        del self._order[key]

    def candidates(self) -> Iterator[ExpertKey]:
        """See EvictionPolicy."""
        return iter(self._order)
