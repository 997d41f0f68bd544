"""Contract: the way that experts take into the fastest tier, and what the slower tier has to do with it.

There are two. `exclusive.ExclusiveRoute` is for tiers in RAM: bytes are read into the block itself, and an expert is
in one tier at a time. `staged.StagedRoute` is for a device's memory: bytes are read into pinned memory and copied
by the device, and the slower tier keeps its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from cache.base import Lease
from prefetch.transfer import Load
from storage.base import ExpertKey


class Route(ABC):
    """Used by the engine's thread."""

    @abstractmethod
    def load(self, key: ExpertKey, level: int) -> tuple[Load, bool] | None:
        """Sets everything aside that bringing an expert to `level` needs. It has no load under way.

        Returns:
            (the load; whether its `run` takes long enough for another thread). None: there is no room in the
            fastest tier, and nothing has changed.
        """

    def hand_out(self, leases: Iterable[Lease]) -> None:  # noqa: B027 - in RAM there is nothing to wait for
        """Makes experts of the fastest tier safe to compute from: a device's kernels wait for their copies."""

    def computed(self) -> None:  # noqa: B027 - in RAM computing has ended when it returns
        """Told after the kernels of leases handed out were launched, before these leases are released."""

    def close(self) -> None:  # noqa: B027 - in RAM nothing is left under way
        """Waits for copies under way. After the last load has ended."""
