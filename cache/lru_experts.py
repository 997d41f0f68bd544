"""lru-experts and lru-pool: evict the least recently used expert whole (DyMoE section 4.4.2)."""

from __future__ import annotations

from cache.lru import LRU


class WholeLRU(LRU):
    """LRU in which an expert is cached in one form or not at all; every kind of block has bytes of its own."""

    whole = True


class PooledLRU(WholeLRU):
    """The paper's cache: experts of all levels share one pool of bytes, and only requests and arrivals are uses."""

    pooled = True
    counts_predictions = False
