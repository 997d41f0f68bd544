"""lru-pool: the paper's cache, one LRU order over whole experts in one pool of bytes (DyMoE section 4.4.2)."""

from __future__ import annotations

from cache.lru_experts import WholeLRU


class PooledLRU(WholeLRU):
    """LRU whose experts of all levels share one pool of bytes, and in which only requests and arrivals are uses."""

    pooled = True
    counts_predictions = False
