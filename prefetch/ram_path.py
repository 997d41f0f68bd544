"""Tiers in RAM: an expert is in one of them, and moves up when it is asked for, down when it is evicted.

Exclusive, because a second tier of ordinary memory that kept what the first has would only be as good as a larger
first one if it were larger than that. Bytes are read into the fast tier's block itself (docs/decisions/0004).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cache.base import Lease, Reservation, Tier, Victim
from prefetch.transfer import Load
from prefetch.transfer_path import Route
from storage.base import LEVELS, Blocks, ExpertKey, PlaneReader, ResidentForm, Source


@dataclass(frozen=True, eq=False)
class Spill:
    """A victim of the fast tier, and the room for it in the slower one, which has the same form."""

    victim: Victim
    room: Reservation


class ExclusiveRoute(Route):
    """See Route. An expert that has lost its upper planes only stays up, and those are forgotten.

    Args:
        vram: the tier that experts come into.
        dram: a slower tier in the same form, or None.
        form: of both tiers.
    """

    def __init__(self, vram: Tier, dram: Tier | None, form: ResidentForm) -> None:
        self.vram, self.dram, self.form = vram, dram, form
        self.spilling: set[ExpertKey] = set()

    def load(self, key: ExpertKey, level: int) -> tuple[Load, bool] | None:
        """See Route. Brings more than `level` where DRAM has it in blocks of more."""
        have = self.dram.level_of(key) if self.dram else 0
        if have > level:
            level = self.form.demoted(have, level)
        reservation = self.vram.reserve(key, level)
        if reservation is None:
            return None
        below = self.dram.acquire(key, have) if self.dram and have else None
        return _Move(self, reservation, below, self._spills(reservation)), True

    def _spills(self, reservation: Reservation) -> list[Spill]:
        """Room in DRAM for the victims that VRAM has nothing left of; what finds none is forgotten."""
        spills: list[Spill] = []
        if self.dram is None:
            return spills
        for victim in reservation.victims:
            # A victim whose spill is under way came back and was evicted again; the first spill may stay.
            if self.vram.level_of(victim.key) or victim.key in self.spilling:
                continue
            room = self._room_below(self.dram, victim)
            if room:
                self.spilling.add(victim.key)
                spills.append(Spill(victim, room))
        return spills

    def _room_below(self, dram: Tier, victim: Victim) -> Reservation | None:
        """Room for as much of a victim as DRAM has blocks for: better its lower planes than nothing of it."""
        for level in LEVELS:
            if 0 < level <= victim.level and self.form.demoted(victim.level, level) == level:
                room = dram.reserve(victim.key, level)
                if room:
                    return room
        return None


class _Move(Load):
    """See Load. `below` is a lease on what DRAM has of the expert, if that has something."""

    def __init__(
        self, route: ExclusiveRoute, reservation: Reservation, below: Lease | None, spills: Sequence[Spill]
    ) -> None:
        self.reservation = reservation
        self._route, self._below, self._spills = route, below, spills
        self._spilled = False
        source = reservation.held or below
        self._source = Source(source.level, source.blocks) if source else None
        self.from_below_alone = below is not None and source is below
        self.bytes_from_below = 0
        if below and self.from_below_alone:
            self.bytes_from_below = sum(
                len(block) for kind, block in reservation.into.items() if kind in below.blocks
            )

    def run(self, form: ResidentForm, reader: PlaneReader) -> int:
        """See Load. Copying and reading release the GIL."""
        # The reservation's blocks are the victims' own: whatever is to be kept of them is copied first.
        for spill in self._spills:
            _copy(spill.victim.blocks, spill.room.into)
        self._spilled = True
        key, level, into = self.reservation.key, self.reservation.level, self.reservation.into
        return form.fill(reader, key, level, into, self._source)

    def end(self, *, complete: bool) -> tuple[Lease | None, int]:
        """See Load."""
        route, lease = self._route, None
        spilled = sum(self._end_spill(route.dram, spill) for spill in self._spills if route.dram)
        if complete:
            lease = route.vram.publish(self.reservation)
        else:
            route.vram.abandon(self.reservation)
        if route.dram:
            if self._below:
                route.dram.release(self._below)
            if lease:
                route.dram.drop(self.reservation.key)
        return lease, spilled

    def _end_spill(self, dram: Tier, spill: Spill) -> int:
        """Bytes that DRAM has more now."""
        key = spill.victim.key
        self._route.spilling.remove(key)
        # One that is on its way back stays here until it has arrived: its own settling drops it.
        if not self._spilled or self._route.vram.level_of(key):
            dram.abandon(spill.room)
            return 0
        dram.release(dram.publish(spill.room))
        return self._route.form.bytes_at(spill.room.level)


def _copy(blocks: Blocks, into: Blocks) -> None:
    for kind, block in into.items():
        np.copyto(np.frombuffer(block, np.uint8), np.frombuffer(blocks[kind], np.uint8))
