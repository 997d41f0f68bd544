"""Contracts: the path that experts take into the fastest tier, and one expert's load on it.

There are two paths. `ram_path.RamPath` is for tiers in RAM: bytes are read into the block itself, and an expert is in
one tier at a time. `device_path.DevicePath` is for a device's memory: bytes are read into pinned memory and copied by
the device, and DRAM keeps its own copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from edgemoe.cache.base import Lease, Reservation, Victim
from edgemoe.storage.base import ExpertKey, PlaneReader, ResidentForm


class Load(ABC):
    """How the bytes of one expert get into blocks of the fastest tier.

    Made by the engine's thread with everything that it needs reserved and leased; `run` at most once, in any thread;
    then ended by the engine's thread, once, which releases all of it.

    Attributes:
        reservation: the blocks in the fastest tier.
        dram_bytes: bytes of the blocks that come from the DRAM tier.
        link_bytes: part of dram_bytes that a device's link copies; 0 in RAM, where a copy takes hardly any time.
        dram_alone: whether DRAM has every plane that the blocks need.
        instant: whether `run` is too short to be worth another thread.
    """

    reservation: Reservation
    dram_bytes: int
    link_bytes: int = 0
    dram_alone: bool
    instant: bool = False

    @property
    def landed(self) -> bool:
        """Whether the blocks have their bytes, once `run` has ended: a device's copies go on after it."""
        return True

    @abstractmethod
    def run(self, form: ResidentForm, reader: PlaneReader) -> int:
        """Fills the blocks, or enqueues a device's copies. Returns the bytes read from disk.

        Raises:
            DamagedData: a read failed.
            RuntimeError: a device refused a copy.
        """

    @abstractmethod
    def end(self, *, complete: bool) -> tuple[Lease | None, int]:
        """Publishes the expert if `run` succeeded, and releases all that was reserved and leased for it.

        Returns:
            (a lease in the fastest tier, or None; bytes that were copied from there into the slower one).
        """


class TransferPath(ABC):
    """Makes loads. Used by the engine's thread.

    Attributes:
        asynchronous: whether copies and kernels go on after the calls that start them: then requests call `hand_out`
            and `computed`.
    """

    asynchronous = False

    @abstractmethod
    def load(self, key: ExpertKey, level: int, *, evict: bool = True) -> Load | None:
        """Sets everything aside that bringing an expert to `level` needs. The expert has no load under way.

        Args:
            key: the expert.
            level: the lowest level that is complete at the load's end.
            evict: whether other experts may be evicted for it.

        Returns:
            the load; None, with nothing changed, where the fastest tier has no blocks for it.
        """

    def spill(self, victim: Victim) -> None:  # noqa: B027 - with a device, DRAM has its own copy
        """Keeps an expert that leaves the fastest tier as that has fewer blocks, where DRAM has blocks for it."""

    def hand_out(self, leases: Iterable[Lease]) -> None:  # noqa: B027 - in RAM there is nothing to wait for
        """Makes leased experts safe to compute from: kernels launched from now on wait for their copies."""

    def computed(self) -> None:  # noqa: B027 - in RAM a computation has ended when its call returns
        """Called after the kernels of the leases were launched, before the leases are released."""

    def close(self) -> None:  # noqa: B027 - in RAM nothing is left under way
        """Waits for copies under way. After the last load has ended."""
