"""Everything that is on its way between disk and tiers: how a transfer starts, and how it ends.

Tiers change in the engine's thread only; workers do nothing but move bytes. So what a tier holds never
changes between a question and the act that follows from it, and no order of events can put an expert in
two places at once or lose a block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from cache.base import Lease, Tier
from prefetch.base import TransferCounts
from prefetch.transfer import Transfer
from prefetch.transfer_path import Route
from prefetch.workers import Workers
from storage.base import ExpertKey, PlaneReader, ResidentForm


class Traffic:
    """The transfers under way, at most one per expert. Used by the engine's thread.

    Args:
        vram: the tier that experts come into.
        dram: a slower tier in the same form, or None.
        route: between the two.
        form: of both tiers.
        reader: of the store. Not closed by this.
        workers, bulk: threads that read and copy, and while much waits (workers.Workers).
        clock: seconds, never going back.

    Raises:
        ValueError: workers is below 1.
    """

    def __init__(
        self,
        vram: Tier,
        dram: Tier | None,
        route: Route,
        form: ResidentForm,
        reader: PlaneReader,
        *,
        workers: int,
        bulk: int = 0,
        clock: Callable[[], float],
    ) -> None:
        self.vram, self.dram, self.route, self.form, self.clock = vram, dram, route, form, clock
        self.counts = TransferCounts()
        self.under_way: dict[ExpertKey, Transfer] = {}
        self._reader = reader
        self._news = threading.Event()
        self.workers: Workers[Transfer] = Workers(workers, self._work, bulk=bulk)

    def start(self, key: ExpertKey, level: int, *, ahead: bool) -> Transfer | None:
        """Queues the transfer of an expert that is not under way and not resident at `level`.

        Args:
            key: the expert.
            level: at least this will be complete in VRAM.
            ahead: it is a guess, and goes behind every demand.

        Returns:
            None: there is no room, and nothing has changed.
        """
        found = self.route.load(key, level)
        if found is None:
            return None
        load, takes_long = found
        transfer = self.under_way[key] = Transfer(key, load, ahead)
        if takes_long:
            self.workers.submit(transfer, ahead=ahead)
        else:
            self._work(transfer)
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
        lease, spilled = transfer.load.end(complete=transfer.read is not None)
        self.counts.spilled_bytes += spilled
        if transfer.read is not None:
            self.counts.ssd_bytes += transfer.read
            self.counts.dram_bytes += transfer.load.bytes_from_below
        return lease

    def close(self) -> None:
        """Ends the threads, and waits for copies under way. Idempotent."""
        self.workers.close()
        self.route.close()

    def _work(self, transfer: Transfer) -> None:
        """In a worker, or at once where there is nothing to wait for."""
        transfer.began = self.clock()
        try:
            transfer.run(self.form, self._reader)
        except BaseException as error:  # the engine's thread decides what becomes of it
            transfer.error = error
        transfer.ended = self.clock()
        transfer.done = True
        self._news.set()
