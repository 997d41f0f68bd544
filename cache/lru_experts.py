"""lru-experts: the least recently used expert goes, whole (DyMoE section 4.4.2)."""

from __future__ import annotations

from cache.lru import LRU


class WholeLRU(LRU):
    """The paper's rule, in which an expert is cached in one form or not at all; LRU's order otherwise."""

    whole = True
