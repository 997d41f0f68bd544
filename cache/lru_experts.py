"""lru-experts: evicts the least recently used expert whole (DyMoE section 4.4.2)."""

from __future__ import annotations

from cache.lru import LRU


class WholeLRU(LRU):
    """LRU in which an expert is cached in one form or not at all, as in the paper."""

    whole = True
