"""One expert on its way into the fastest tier: what a worker does, and when it began and ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from cache.base import Lease, Reservation
from storage.base import ExpertKey, PlaneReader, ResidentForm


class Load(ABC):
    """How the bytes of one expert get into blocks of the fastest tier.

    Made by the engine's thread with everything it needs reserved and pinned; `run` at most once, in any thread;
    then ended by the engine's thread, once.

    Attributes:
        reservation: the blocks in the fastest tier.
        bytes_from_below: bytes of them that come from the slower tier.
        link_bytes: bytes of these that a device copies: they keep its link busy as reading keeps a disk. In RAM an
            expert moves too quickly to count.
        from_below_alone: whether the slower tier has all that they need.
    """

    reservation: Reservation
    bytes_from_below: int
    link_bytes: int = 0
    from_below_alone: bool

    @abstractmethod
    def run(self, form: ResidentForm, reader: PlaneReader) -> int:
        """Fills the blocks, or has a device do so. Returns the bytes read from disk.

        Raises:
            DamagedData: a read failed.
            RuntimeError: a device refused a copy.
        """

    @abstractmethod
    def end(self, *, complete: bool) -> tuple[Lease | None, int]:
        """Makes the expert visible in the tiers if `run` succeeded, and gives back all that was held for it.

        Returns:
            (a lease in the fastest tier, or None; bytes that were copied from there into the slower one).
        """


@dataclass(eq=False, slots=True)
class Transfer:
    """Made and settled by the engine's thread, run by a worker between the two; never by both at once.

    Args:
        key: the expert.
        load: of its bytes.
        ahead: begun on a guess, before anybody asked for it.
        asked: seconds on the clock at which somebody did ask for it; None: nobody has.
        read: bytes read from disk, once complete; None before, and where it failed or was never started.
        error: what it failed with.
        began: seconds on the clock when the worker took it.
        ended: seconds on the clock when it had done it.
        done: the worker will not touch it any more.
    """

    key: ExpertKey
    load: Load
    ahead: bool
    asked: float | None = None
    read: int | None = None
    error: BaseException | None = None
    began: float = 0.0
    ended: float = 0.0
    done: bool = False

    @property
    def reservation(self) -> Reservation:
        """Its blocks in the fastest tier."""
        return self.load.reservation

    def run(self, form: ResidentForm, reader: PlaneReader) -> None:
        """In a worker. Raises as Load.run."""
        self.read = self.load.run(form, reader)

    @property
    def from_below_alone(self) -> bool:
        """Whether it is complete, and the slower tier had all of it."""
        return self.read == 0 and self.load.from_below_alone

    def hidden_s(self, asked: float) -> float:
        """Seconds of a done transfer that had passed when it was asked for."""
        return max(0.0, min(asked, self.ended) - self.began)

    @property
    def moved(self) -> int:
        """Bytes that a disk or a device's link was busy with for it."""
        return 0 if self.read is None else self.read + self.load.link_bytes

    def hidden_bytes(self, asked: float) -> int:
        """Bytes that a done transfer had moved when it was asked for, at an even pace."""
        lasted = self.ended - self.began
        share = self.hidden_s(asked) / lasted if lasted > 0 else float(asked >= self.ended)
        return round(self.moved * share)
