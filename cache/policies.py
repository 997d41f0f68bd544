"""Eviction policies by name."""

from __future__ import annotations

from edgemoe.cache.base import EvictionPolicy
from edgemoe.cache.lfru import LFRU
from edgemoe.cache.lru import LRU, PooledLRU, WholeLRU
from edgemoe.errors import UserError

_POLICIES: dict[str, type[EvictionPolicy]] = {
    "lru-planes": LRU,
    "lru-experts": WholeLRU,
    "lru-pool": PooledLRU,
    "lfru": LFRU,
}

POLICIES = tuple(_POLICIES)
"""Every name that make_policy accepts; another policy is a file of its own and an entry here."""


def is_pooled(name: str) -> bool:
    """Whether experts of all levels share one pool of bytes under a policy (EvictionPolicy.pooled)."""
    return _POLICIES[name].pooled


def make_policy(name: str) -> EvictionPolicy:
    """Constructs an empty policy.

    Raises:
        UserError: `name` is none of POLICIES.
    """
    if name not in _POLICIES:
        raise UserError("the name of an eviction policy", repr(name), f"choose one of {', '.join(POLICIES)}")
    return _POLICIES[name]()
