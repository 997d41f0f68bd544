"""Everything that is on its way between disk and tiers: how a transfer starts, and how it ends.

Tiers change in the engine's thread only; workers do nothing but move bytes. So what a tier holds never
changes between a question and the act that follows from it, and no order of events can put an expert in
both tiers or lose a block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from cache.base import Lease, Reservation, Tier, Victim
from prefetch.base import TransferCounts
from prefetch.transfer import Spill, Transfer
from prefetch.workers import Workers
from storage.base import LEVELS, ExpertKey, PlaneReader, ResidentForm


class Traffic:
    """The transfers under way, at most one per expert. Used by the engine's thread.

    The tiers are exclusive: an expert moves up when it is asked for, and down when it is evicted whole, if
    there is room. An expert that has lost its upper planes only stays up, and those are forgotten.

    Args:
        vram: the tier that experts come into.
        dram: a slower tier in the same form, or None.
        form: of both tiers.
        reader: of the store. Not closed by this.
        workers: threads that read and copy.
        clock: seconds, never going back.

    Raises:
        ValueError: workers is below 1.
    """

    def __init__(
        self,
        vram: Tier,
        dram: Tier | None,
        form: ResidentForm,
        reader: PlaneReader,
        *,
        workers: int,
        clock: Callable[[], float],
    ) -> None:
        self.vram, self.dram, self.form, self.clock = vram, dram, form, clock
        self.counts = TransferCounts()
        self.under_way: dict[ExpertKey, Transfer] = {}
        self._reader = reader
        self._spilling: set[ExpertKey] = set()
        self._news = threading.Event()
        self.workers: Workers[Transfer] = Workers(workers, self._work)

    def start(self, key: ExpertKey, level: int, *, ahead: bool) -> Transfer | None:
        """Queues the transfer of an expert that is not under way and not resident at `level`.

        Args:
            key: the expert.
            level: at least this will be complete in VRAM; more, where DRAM has it in blocks of more.
            ahead: it is a guess, and goes behind every demand.

        Returns:
            None: there is no room, and nothing has changed.
        """
        have = self.dram.level_of(key) if self.dram else 0
        if have > level:
            level = self.form.demoted(have, level)
        reservation = self.vram.reserve(key, level)
        if reservation is None:
            return None
        below = self.dram.acquire(key, have) if self.dram and have else None
        transfer = Transfer(key, reservation, below, self._spills(reservation), ahead)
        self.under_way[key] = transfer
        self.workers.submit(transfer, ahead=ahead)
        return transfer

    def withdraw(self, transfer: Transfer) -> bool:
        """Whether the transfer had not begun. It has ended then, and what it had reserved is free."""
        if not self.workers.withdraw(transfer):
            return False
        self.counts.speculated_cancelled += transfer.ahead
        self.settle(transfer)
        return True

    def done(self) -> list[Transfer]:
        """The transfers that are done now."""
        return [transfer for transfer in self.under_way.values() if transfer.done]

    def next_done(self, among: Collection[Transfer]) -> Transfer:
        """One of some transfers that is done, waiting for it if need be."""
        while True:
            # Cleared before the look: a worker that is done after the look sets it again.
            self._news.clear()
            for transfer in among:
                if transfer.done:
                    return transfer
            self._news.wait()

    def settle(self, transfer: Transfer) -> Lease | None:
        """Makes a transfer that is done visible in the tiers. None: it failed, or never began."""
        del self.under_way[transfer.key]
        for spill in transfer.spills:
            self._settle_spill(spill, transfer.spilled)
        lease = None
        if transfer.read is None:
            self.vram.abandon(transfer.reservation)
        else:
            self.counts.ssd_bytes += transfer.read
            self.counts.dram_bytes += transfer.bytes_from_below
            lease = self.vram.publish(transfer.reservation)
        if self.dram:
            if transfer.below:
                self.dram.release(transfer.below)
            if lease:
                self.dram.drop(transfer.key)
        return lease

    def _spills(self, reservation: Reservation) -> list[Spill]:
        """Room in DRAM for the victims that VRAM has nothing left of; what finds none is forgotten."""
        spills: list[Spill] = []
        if self.dram is None:
            return spills
        for victim in reservation.victims:
            # A victim whose spill is under way came back and was evicted again; the first spill may stay.
            if self.vram.level_of(victim.key) or victim.key in self._spilling:
                continue
            room = self._room_below(self.dram, victim)
            if room:
                self._spilling.add(victim.key)
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

    def _settle_spill(self, spill: Spill, copied: bool) -> None:
        if self.dram is None:
            return
        key = spill.victim.key
        self._spilling.remove(key)
        # One that is on its way back stays here until it has arrived: its own settling drops it.
        if copied and not self.vram.level_of(key):
            self.counts.spilled_bytes += self.form.bytes_at(spill.room.level)
            self.dram.release(self.dram.publish(spill.room))
        else:
            self.dram.abandon(spill.room)

    def _work(self, transfer: Transfer) -> None:
        """In a worker."""
        transfer.began = self.clock()
        try:
            transfer.run(self.form, self._reader)
        except BaseException as error:  # the engine's thread decides what becomes of it
            transfer.error = error
        transfer.ended = self.clock()
        transfer.done = True
        self._news.set()
