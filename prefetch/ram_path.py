"""The path between tiers in RAM: an expert is in one tier, moves up when it is requested, and down when it is evicted.

A second tier of ordinary memory that kept copies of the first tier's experts would be of less use than a larger first
tier. Bytes are read into the fast tier's block itself (docs/decisions/0004).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgemoe.cache.base import Lease, Reservation, Victim
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.prefetch.transfer_path import Load, TransferPath
from edgemoe.storage.base import LEVELS, Blocks, ExpertKey, PlaneReader, ResidentForm, Source


@dataclass(frozen=True, eq=False)
class Spill:
    """A victim of the fast tier, and its blocks in DRAM, which has the same form."""

    victim: Victim
    into: Reservation


class RamPath(TransferPath):
    """Implements TransferPath. An expert that lost only its upper planes stays in the fast tier, without them.

    Args:
        vram: the tier that experts come into.
        dram: a slower tier in the same form, or None.
        form: the form of experts in both tiers.
    """

    def __init__(self, vram: PlaneTier, dram: PlaneTier | None, form: ResidentForm) -> None:
        self.vram, self.dram, self.form = vram, dram, form
        self.spilling: set[ExpertKey] = set()
        self._of_use = {
            (have, level) for have in LEVELS for level in LEVELS if have and form.builds_on(have, level)
        }
        """(level of blocks in memory, wanted level) where the blocks save reads."""

    def load(self, key: ExpertKey, level: int, *, evict: bool = True) -> Load | None:
        """Reserves an expert's blocks, at more than `level` where DRAM has it in larger blocks."""
        have = self.dram.level_of(key) if self.dram else 0
        if have > level:
            level = self.form.demoted(have, level)
        reservation = self.vram.reserve(key, level, keep_victims=self.dram is not None, evict=evict)
        if reservation is None:
            return None
        in_dram = self.dram.acquire(key, have) if self.dram and have else None
        spills = self._spills(self.dram, reservation) if self.dram else ()
        source = reservation.lease or in_dram
        if source and (source.level, level) not in self._of_use:
            source = None
        move = _Move(self, reservation, source, in_dram, spills)
        if in_dram and source is in_dram:
            move.dram_alone = True
            move.dram_bytes = sum(
                len(block) for kind, block in reservation.into.items() if kind in in_dram.blocks
            )
        return move

    def spill(self, victim: Victim) -> None:
        """Copies an expert that leaves the fast tier to DRAM, which may evict others for it."""
        into = self._dram_blocks(self.dram, victim) if self.dram else None
        if self.dram and into:
            _copy(victim.blocks, into.into)
            self.dram.release(self.dram.publish(into))

    def _spills(self, dram: PlaneTier, reservation: Reservation) -> list[Spill]:
        """DRAM's blocks for victims of which VRAM keeps nothing; victims without free blocks are forgotten."""
        spills: list[Spill] = []
        for victim in reservation.victims:
            # A victim whose spill is under way came back and was evicted again; the first spill may stay.
            if self.vram.level_of(victim.key) or victim.key in self.spilling:
                continue
            into = self._dram_blocks(dram, victim)
            if into:
                self.spilling.add(victim.key)
                spills.append(Spill(victim, into))
        return spills

    def _dram_blocks(self, dram: PlaneTier, victim: Victim) -> Reservation | None:
        """Reserves as many of a victim's planes as DRAM has blocks for, from the lowest up."""
        for level in LEVELS:
            if 0 < level <= victim.level and self.form.demoted(victim.level, level) == level:
                into = dram.reserve(victim.key, level, keep_victims=False)
                if into:
                    return into
        return None


@dataclass(eq=False)
class _Move(Load):
    """Implements Load.

    Args:
        path: the path that it belongs to.
        reservation: blocks of the fast tier.
        source: a lease on planes of the expert that the blocks are made from, in either tier; None: all are read.
        in_dram: a lease on the planes that DRAM has of the expert; None: it has none.
        spills: victims to be copied to DRAM.
        dram_alone: whether DRAM has every plane that the reserved blocks need.
        dram_bytes: bytes of the blocks that are copied from DRAM.
        spilled: whether the victims have been copied.
    """

    path: RamPath
    reservation: Reservation
    source: Lease | None
    in_dram: Lease | None
    spills: Sequence[Spill]
    dram_alone: bool = False
    dram_bytes: int = 0
    spilled: bool = False

    def run(self, form: ResidentForm, reader: PlaneReader) -> int:
        """Copies victims to DRAM, then fills the blocks. Copies and reads release the GIL."""
        # The reservation's blocks are the victims' own: a victim is copied before they are written.
        for spill in self.spills:
            _copy(spill.victim.blocks, spill.into.into)
        self.spilled = True
        key, level, into = self.reservation.key, self.reservation.level, self.reservation.into
        source = Source(self.source.level, self.source.blocks) if self.source else None
        return form.fill(reader, key, level, into, source)

    def end(self, *, complete: bool) -> tuple[Lease | None, int]:
        """Publishes or abandons the blocks, and makes DRAM give up what has moved."""
        path, lease, spilled = self.path, None, 0
        if path.dram:
            for spill in self.spills:
                spilled += self._end_spill(path.dram, spill)
        if complete:
            lease = path.vram.publish(self.reservation)
        else:
            path.vram.abandon(self.reservation)
        if path.dram:
            if self.in_dram:
                path.dram.release(self.in_dram)
            if lease:
                path.dram.drop(self.reservation.key)
        return lease, spilled

    def _end_spill(self, dram: PlaneTier, spill: Spill) -> int:
        """Ends a victim's copy. Returns the bytes that DRAM gained."""
        key = spill.victim.key
        self.path.spilling.remove(key)
        # A victim that is on its way back to VRAM stays in DRAM until its own load ends.
        if not self.spilled or self.path.vram.level_of(key):
            dram.abandon(spill.into)
            return 0
        dram.release(dram.publish(spill.into))
        return self.path.form.bytes_at(spill.into.level)


def _copy(blocks: Blocks, into: Blocks) -> None:
    for kind, block in into.items():
        np.copyto(np.frombuffer(block, np.uint8), np.frombuffer(blocks[kind], np.uint8))
