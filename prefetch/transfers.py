"""The transfers under way between disk and tiers: how each starts, and how it ends.

Only the engine's thread changes tiers; workers move bytes and nothing else. So a tier's content does not change between
a look at it and the change that follows, and no order of events puts an expert in two places or loses a block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from edgemoe.cache.base import Lease, Reservation
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.errors import DoesNotFit
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.launched import LaunchedWork
from edgemoe.prefetch.ram_path import RamPath
from edgemoe.prefetch.transfer_path import Load, TransferPath
from edgemoe.prefetch.workers import Workers
from edgemoe.storage.base import ExpertKey, PlaneReader, ResidentForm
from edgemoe.storage.sizes import format_size


class Owner(Protocol):
    """The prediction that a transfer was started on. It ends and cancels its transfers itself, and counts their use."""

    def end_transfer(self, transfer: Transfer) -> Lease | None:
        """Ends a transfer that is done, as Transfers.end_transfer."""

    def land(self, transfer: Transfer) -> None:
        """Ends a transfer that is done and that no request waits for."""

    def cancel(self, transfer: Transfer) -> bool:
        """Cancels a transfer, as Transfers.cancel."""


@dataclass(eq=False, slots=True)
class Transfer:
    """One expert on its way. Made and ended by the engine's thread, run by a worker in between.

    Args:
        key: the expert.
        load: loads its bytes.
        run: runs the load, and returns the bytes read from disk.
        counts: the counters that its end adds to.
        owner: the prediction that it was started on; None: a demand, or a move.
        requested: seconds on the clock at which its expert was requested; None: it has not been.
        read: bytes read from disk, once complete; None before, and where it failed or was never started.
        error: the error that ended it; None while there is none.
        began, ended: seconds on the clock when the worker took it and was done with it.
        done: whether the worker has stopped using it.
    """

    key: ExpertKey
    load: Load
    run: Callable[[], int]
    counts: TransferCounts
    owner: Owner | None = None
    requested: float | None = None
    read: int | None = None
    error: BaseException | None = None
    began: float = 0.0
    ended: float = 0.0
    done: bool = False

    @property
    def reservation(self) -> Reservation:
        """Its blocks in the fastest tier."""
        return self.load.reservation

    @property
    def dram_alone(self) -> bool:
        """Whether it is complete, and DRAM had all of it."""
        return self.read == 0 and self.load.dram_alone

    def hidden_s(self, requested: float) -> float:
        """Seconds of a done transfer that had passed when its expert was requested."""
        return max(0.0, min(requested, self.ended) - self.began)

    @property
    def moved(self) -> int:
        """Bytes that a disk or a device's link moved for it."""
        return 0 if self.read is None else self.read + self.load.link_bytes

    def hidden_bytes(self, requested: float) -> int:
        """Bytes that a done transfer had moved when its expert was requested, at an even pace."""
        lasted = self.ended - self.began
        fraction = self.hidden_s(requested) / lasted if lasted > 0 else float(requested >= self.ended)
        return round(self.moved * fraction)


class Transfers:
    """The transfers under way, at most one per expert. Used by the engine's thread.

    Args:
        vram: the tier that experts come into.
        dram: a slower tier in the same form, or None.
        path: moves experts between the two tiers.
        form: the form of experts in both tiers.
        reader: reads the store; it is not closed here.
        workers, scan_workers: number of threads that read and copy, and number while a scan waits (workers.Workers).
        clock: seconds, never going back.

    Raises:
        ValueError: workers is below 1.
    """

    def __init__(
        self,
        vram: PlaneTier,
        dram: PlaneTier | None,
        path: TransferPath,
        form: ResidentForm,
        reader: PlaneReader,
        *,
        workers: int,
        scan_workers: int = 0,
        clock: Callable[[], float],
    ) -> None:
        self.vram, self.dram, self.path, self.form, self.clock = vram, dram, path, form, clock
        self.under_way: dict[ExpertKey, Transfer] = {}
        """Transfers of demanded experts, and of experts read ahead of the next demand."""
        self.moving: dict[ExpertKey, Transfer] = {}
        """Transfers of transitions.Transitions, which end between two steps."""
        self._reader, self._retries, self._compensators = reader, 0, False
        self.launched = LaunchedWork()
        self.request_open = False
        """Whether a request for experts is open: only it changes the tiers then."""
        self._ended = threading.Event()
        self.workers: Workers[Transfer] = Workers(workers, self._work, scan_count=scan_workers)
        self._movers: Workers[Transfer] | None = None

    def of_compensators(self, tier: PlaneTier, form: ResidentForm, reader: PlaneReader) -> Transfers:
        """Makes transfers of compensators into their tier in RAM, by the same threads.

        `await_done` of either waits for both.
        """
        made = copy(self)
        made.vram, made.dram, made.form = tier, None, form
        made._reader, made._retries, made._compensators = reader, reader.retries, True
        made.path = RamPath(tier, None, form)
        made.under_way, made.moving = {}, {}
        return made

    def new_retries(self) -> int:
        """Returns the attempts after failed reads since the last call."""
        before, self._retries = self._retries, self._reader.retries
        return self._retries - before

    def start(
        self, key: ExpertKey, level: int, counts: TransferCounts, *, ahead_of: Owner | None = None
    ) -> Transfer | None:
        """Starts the transfer of an expert that is not under way and not resident at `level`.

        Args:
            key: the expert.
            level: the lowest level that is complete in VRAM at its end.
            counts: the counters of the step that wants it.
            ahead_of: the prediction on which it is read, after every demanded read; None: it is demanded.

        Returns:
            None, with nothing changed, where the tier has no blocks for it.
        """
        load = self.path.load(key, level)
        if load is None:
            return None
        run = partial(load.run, self.form, self._reader)
        transfer = self.under_way[key] = Transfer(key, load, run, counts, ahead_of)
        if load.instant:
            self._work(transfer)
        else:
            self.workers.submit(transfer, ahead=ahead_of is not None)
        return transfer

    def move(self, key: ExpertKey, level: int, counts: TransferCounts, *, threads: int) -> Transfer | None:
        """Starts a transfer that takes free blocks only, on threads of its own: a slow read holds up no demanded one.

        A load that is instant runs at once.

        Args:
            key: an expert that has no transfer.
            level, counts: see `start`.
            threads: number of threads of all moves; the first call starts them.

        Returns:
            None, with nothing changed, where no blocks are free.
        """
        load = self.path.load(key, level, evict=False)
        if load is None:
            return None
        if self._movers is None:
            self._movers = Workers(threads, self._work, name="move")
        transfer = self.moving[key] = Transfer(key, load, partial(load.run, self.form, self._reader), counts)
        if load.instant:
            self._work(transfer)
        else:
            self._movers.submit(transfer)
        return transfer

    def adopt(self, key: ExpertKey, counts: TransferCounts, owner: Owner) -> Transfer:
        """Makes a move one of the transfers under way, of a step's prediction: its expert is requested."""
        transfer = self.under_way[key] = self.moving.pop(key)
        transfer.counts, transfer.owner = counts, owner
        return transfer

    def end_a_move(self, counts: TransferCounts) -> bool:
        """Ends a move that is done or has not begun, for a demand that lacks blocks. False: there is none."""
        for transfer in self.moving.values():
            if transfer.done:
                self.end_move(transfer, counts)
                return True
            if self.cancel(transfer):
                return True
        return False

    def end_move(self, transfer: Transfer, counts: TransferCounts) -> None:
        """Publishes a move that is done, counted in `counts`; a failed one leaves its expert as it was."""
        transfer.counts = counts
        if lease := self.end_transfer(transfer):
            self.vram.release(lease)

    def cancel(self, transfer: Transfer) -> bool:
        """Ends a transfer that has not begun, and frees its blocks. Returns whether it had not begun."""
        if not (self.workers.cancel(transfer) or (self._movers and self._movers.cancel(transfer))):
            return False
        transfer.counts.speculated_cancelled += transfer.owner is not None
        self.end_transfer(transfer)
        return True

    def await_done(self, among: Collection[Transfer], seconds: float | None = None) -> None:
        """Waits until one of some transfers is done, or until one wait of `seconds` has passed without any's end."""
        while True:
            # Cleared before the look: a worker that ends after the look sets it again.
            self._ended.clear()
            for transfer in among:
                if transfer.done:
                    return
            if not self._ended.wait(seconds):
                return

    def end_transfer(self, transfer: Transfer) -> Lease | None:
        """Publishes a transfer that is done, and returns its lease; None: it failed, or never began."""
        moving = self.moving.get(transfer.key) is transfer
        del (self.moving if moving else self.under_way)[transfer.key]
        lease, spilled = transfer.load.end(complete=transfer.read is not None)
        counts = transfer.counts
        counts.spilled_bytes += spilled
        if transfer.read is not None:
            counts.ssd_bytes += transfer.read
            counts.compensator_bytes += transfer.read if self._compensators else 0
            counts.dram_bytes += transfer.load.dram_bytes
            if moving:
                counts.promoted += 1
                counts.moved_bytes += transfer.read + transfer.load.dram_bytes
        return lease

    def require_no_request(self) -> None:
        """Raises ValueError while a request is open."""
        if self.request_open:
            raise ValueError("expected no open request, got one")

    def too_small(self, key: ExpertKey, level: int) -> DoesNotFit:
        """Returns the error of a tier that cannot hold one expert at a level."""
        size = self.form.bytes_at(level)
        return DoesNotFit(
            f"{format_size(size)} for expert {key.expert} of layer {key.layer} at level {level}",
            "a tier that is smaller",
            "raise --vram-limit, or use a lower level",
            minimum=size,
        )

    def close(self) -> None:
        """Ends the threads, and waits for copies under way. Idempotent."""
        self.workers.close()
        if self._movers:
            self._movers.close()
        self.path.close()

    def _work(self, transfer: Transfer) -> None:
        """Runs a transfer: in a worker, or at once where it is instant."""
        transfer.began = self.clock()
        try:
            transfer.read = transfer.run()
        except BaseException as error:  # the engine's thread raises it, or not
            transfer.error = error
        transfer.ended = self.clock()
        transfer.done = True
        self._ended.set()
