"""lfru: evicts the expert with the fewest uses first, where recent uses count more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush, heapreplace
from math import exp2, log2

from edgemoe.cache.base import EvictionPolicy
from edgemoe.storage.base import ExpertKey


class LFRU(EvictionPolicy):
    """The lowest score goes first: a use adds 1 to its expert's score, and all scores decay with every use.

    A score halves while `memory` uses per resident expert go by: near 0 this is LRU, near infinity it is
    least frequently used ("LRFU", Lee et al. 2001, whose lambda is 1 / (memory * residents)). Counted per
    resident, one memory suits caches of any size. Scores outlive eviction, so that an expert that returns
    is not taken for a new one: a model has thousands of experts, not millions.

    All scores decay alike, so only uses change their order. Kept is the logarithm of a score carried back
    to time 0, which never falls. So an entry of a heap may be older than its score and still bound it from
    below: a use takes constant time, and the search for a victim brings up to date the entries it meets, in
    logarithmic time each.

    Args:
        memory: half-life of a use, in uses per resident expert; above 0.

    Raises:
        ValueError: memory is not above 0.
    """

    def __init__(self, memory: float = 16.0) -> None:
        if memory <= 0:
            raise ValueError(f"expected a memory above 0 uses per resident, got {memory}")
        self._memory = memory
        self._now = 0.0
        self._scores: dict[ExpertKey, float] = {}
        self._resident: set[ExpertKey] = set()
        self._heap: list[tuple[float, ExpertKey]] = []
        self._heaped: set[ExpertKey] = set()
        """Keys with an entry: every resident, and evicted ones that no search has met yet."""
        self._passed: list[tuple[float, ExpertKey]] = []
        """Entries that the last search took from the heap; they are back before the next."""

    def used(self, keys: Iterable[ExpertKey]) -> None:
        """Adds a use to each key's score; KeyError for one that is not resident."""
        scores, resident = self._scores, self._resident
        step = 1 / (self._memory * max(len(resident), 1))
        for key in keys:
            if key not in resident:
                raise KeyError(key)
            self._now = now = self._now + step
            before = scores.get(key)
            # Relative to now, so that the exponential of a far past is 0 and none overflows.
            scores[key] = now if before is None else now + log2(1 + exp2(before - now))

    def arrived(self, key: ExpertKey) -> None:
        """Makes a key resident. A promotion is no second use: the request for it was one."""
        if key in self._resident:
            return
        self._resident.add(key)
        self._now = now = self._now + 1 / (self._memory * len(self._resident))
        before = self._scores.get(key)
        score = self._scores[key] = now if before is None else now + log2(1 + exp2(before - now))
        if key not in self._heaped:
            self._heaped.add(key)
            heappush(self._heap, (score, key))

    def forgotten(self, key: ExpertKey) -> None:
        """Makes a key not resident; its score stays."""
        self._resident.remove(key)

    def candidates(self) -> Iterator[ExpertKey]:
        """Yields the key of the lowest score first."""
        heap = self._heap
        while self._passed:
            heappush(heap, self._passed.pop())
        while heap:
            bound, key = heap[0]
            if key not in self._resident:
                heappop(heap)
                self._heaped.remove(key)
            elif bound < self._scores[key]:
                heapreplace(heap, (self._scores[key], key))
            else:
                self._passed.append(heappop(heap))
                yield key

    def heat(self) -> dict[ExpertKey, float]:
        """Returns the score of every expert that was ever used, relative to the highest."""
        highest = max(self._scores.values(), default=0.0)
        return {key: max(exp2(score - highest), 1e-9) for key, score in self._scores.items()}
