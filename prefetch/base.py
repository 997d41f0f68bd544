"""Contracts of prefetch: which experts a layer needs, and in what order they come.

The engine asks for a layer's experts and gets leases back as they become ready: hits at once, misses as
their planes arrive from a slower tier. Sees the cache's interface only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields

from cache.base import Lease
from storage.base import ExpertKey


@dataclass
class TransferCounts:
    """What moved since the counters were last taken. Bytes and experts."""

    ssd_bytes: int = 0
    """Read from disk."""
    dram_bytes: int = 0
    """Copied from the DRAM tier into the VRAM tier."""
    spilled_bytes: int = 0
    """Copied from the VRAM tier back into the DRAM tier on eviction."""
    vram_hits: int = 0
    """Experts found in the VRAM tier at the asked level or above."""
    dram_hits: int = 0
    """Experts that needed no disk read, but came from the DRAM tier."""
    requests: int = 0
    """Experts asked for; level 0 is never asked for."""
    levels: dict[int, int] = field(default_factory=dict)
    """Asked level -> experts."""

    def __add__(self, other: TransferCounts) -> TransferCounts:
        """Both together."""
        levels = {k: self.levels.get(k, 0) + other.levels.get(k, 0) for k in self.levels | other.levels}
        numbers = {
            f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "levels"
        }
        return TransferCounts(**numbers, levels=levels)


class ExpertSource(ABC):
    """Brings experts into the fastest tier and hands them out. Used by one engine thread."""

    @abstractmethod
    def stream(self, wanted: Mapping[ExpertKey, int]) -> AbstractContextManager[Iterator[Lease]]:
        """The experts of `wanted` (key -> level, level > 0), each exactly once, in the order they get ready.

        A lease is valid until the next one is asked for or the context ends; leases are released by
        this, not by the caller. Hits come first. Works however small the tier is, as long as one expert
        fits: what finds no room waits until a lease ends. Leaving the context early (an error, Ctrl-C)
        waits for reads under way and leaves the tiers whole.

        Raises:
            DamagedData: when a read fails; every other transfer of the call is waited for first.
        """

    @abstractmethod
    def take_counts(self) -> TransferCounts:
        """The counters since the last call, and starts them anew."""

    @abstractmethod
    def close(self) -> None:
        """Stops the workers. Idempotent; waits for reads under way."""
