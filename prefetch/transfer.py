"""One expert on its way into the fastest tier: everything a worker needs to know, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache.base import Lease, Reservation, Victim
from storage.base import Blocks, ExpertKey, PlaneReader, ResidentForm, Source


@dataclass(frozen=True, eq=False)
class Spill:
    """A victim of the fast tier, and the room for it in the slower one, which has the same form."""

    victim: Victim
    room: Reservation


@dataclass(eq=False, slots=True)
class Transfer:
    """Made and settled by the engine's thread, run by a worker between the two; never by both at once.

    Args:
        key: the expert.
        reservation: its blocks in the fast tier.
        below: a lease on what the slower tier has of it, if that has it.
        spills: victims of `reservation` that the slower tier has room for.
        ahead: begun on a guess, before anybody asked for it.
        asked: seconds on the clock at which somebody did ask for it; None: nobody has.
        spilled: the victims' bytes have been copied.
        read: bytes read from disk, once complete; None before, and where it failed or was never started.
        error: what it failed with.
        began: seconds on the clock when the worker took it.
        ended: seconds on the clock when it had done it.
        done: the worker will not touch it any more.
    """

    key: ExpertKey
    reservation: Reservation
    below: Lease | None
    spills: Sequence[Spill]
    ahead: bool
    asked: float | None = None
    spilled: bool = False
    read: int | None = None
    error: BaseException | None = None
    began: float = 0.0
    ended: float = 0.0
    done: bool = False

    @property
    def source(self) -> Lease | None:
        """What it starts from, in the one of the tiers that has something of it."""
        return self.reservation.held or self.below

    def run(self, form: ResidentForm, reader: PlaneReader) -> None:
        """Copies the victims' bytes, then fills the reservation. In a worker; both release the GIL.

        Raises:
            DamagedData: a read failed.
        """
        # The reservation's blocks are the victims' own: whatever is to be kept of them is copied first.
        for spill in self.spills:
            _copy(spill.victim.blocks, spill.room.into)
        self.spilled = True
        source = self.source
        self.read = form.fill(
            reader,
            self.key,
            self.reservation.level,
            self.reservation.into,
            Source(source.level, source.blocks) if source else None,
        )

    @property
    def bytes_from_below(self) -> int:
        """Bytes of the blocks that were filled from the slower tier's."""
        if self.below is None or self.source is not self.below:
            return 0
        return sum(len(block) for kind, block in self.reservation.into.items() if kind in self.below.blocks)

    @property
    def from_below_alone(self) -> bool:
        """Whether it is complete, and the slower tier had all of it."""
        return self.read == 0 and self.below is not None and self.source is self.below

    def hidden_s(self, asked: float) -> float:
        """Seconds of a done transfer that had passed when it was asked for."""
        return max(0.0, min(asked, self.ended) - self.began)

    def hidden_bytes(self, asked: float) -> int:
        """Bytes that a done transfer had read from disk when it was asked for, at an even pace."""
        lasted = self.ended - self.began
        share = self.hidden_s(asked) / lasted if lasted > 0 else float(asked >= self.ended)
        return round((self.read or 0) * share)


def _copy(blocks: Blocks, into: Blocks) -> None:
    for kind, block in into.items():
        np.copyto(np.frombuffer(block, np.uint8), np.frombuffer(blocks[kind], np.uint8))
