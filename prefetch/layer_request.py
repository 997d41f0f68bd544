"""One request of a layer's experts: hits first, then arrivals, in whatever blocks are free."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType

from edgemoe.cache.base import Lease
from edgemoe.machine.sigint import CHECK_EVERY, DeferredInterrupt
from edgemoe.prefetch.base import Request
from edgemoe.prefetch.compensators.leases import CompensatorLeases
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.lookahead import Lookahead
from edgemoe.prefetch.speculation import Speculation
from edgemoe.prefetch.transfers import Transfer, Transfers
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.files.retry import GivingUp


class LayerRequest(Request):
    """Implements Request, as the context of StepExperts.request. Used by the engine's thread.

    Args:
        transfers: run the demands.
        lookahead: the predictions of all steps.
        speculation: the prediction of the step, which this request confirms or refutes.
        counts: the counters of the step.
        levels: expert -> level in bits that it is needed at.
        scan: whether a prompt wants most of the layer's experts, which then leave the cache first.
        compensators: leases of the compensators of the wanted experts; None: there is no tier of these.
    """

    def __init__(
        self,
        transfers: Transfers,
        lookahead: Lookahead,
        speculation: Speculation,
        counts: TransferCounts,
        levels: Mapping[ExpertKey, int],
        *,
        scan: bool,
        compensators: CompensatorLeases | None,
    ) -> None:
        self._transfers, self._vram, self._counts = transfers, transfers.vram, counts
        self._lookahead, self._speculation = lookahead, speculation
        self._compensators = compensators
        self._wanted, self._scan = levels, scan
        self._interrupt = DeferredInterrupt()
        self._hits: list[Lease] = []
        self._arrived: list[Lease] = []
        self._missing: deque[ExpertKey] = deque()
        self._awaited: dict[ExpertKey, Transfer] = {}
        self._current: list[Lease] = []
        self._stopped = False
        self._brought: list[ExpertKey] = []
        """Experts of a scan that were not resident before they were predicted or requested."""
        self.open = False

    def __enter__(self) -> LayerRequest:
        """Leases every hit, so that no miss evicts one, takes over transfers under way, and starts the misses."""
        self._interrupt.__enter__()
        self.open = self._transfers.request_open = True
        self._transfers.workers.scanning = self._scan
        try:
            self._begin()
            self.advance()
        except BaseException:
            self.__exit__(None, KeyboardInterrupt(), None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends every lease and transfer. A read error met only here is not raised: no caller waits for its expert."""
        try:
            self.finish()
            if error is not None:
                with GivingUp():
                    self._speculation.end()
        finally:
            self.open = self._transfers.request_open = False
            self._interrupt.__exit__(kind, error, trace)

    def _begin(self) -> None:
        """Ends the prediction, leases the hits, and makes the others missing or awaited."""
        came = self._speculation.resolve(self._wanted)
        if not self._scan:
            self._vram.clear_evict_first()
        if self._compensators:
            self._compensators.begin()
        counts = self._counts
        counts.requests += len(self._wanted)
        for level in self._wanted.values():
            counts.levels[level] = counts.levels.get(level, 0) + 1
        hits, partial, missing = self._vram.acquire_all(self._wanted)
        for lease in hits:
            (self._arrived if lease.arriving else self._hits).append(lease)
            if self._compensators:
                self._compensators.want(lease.key, lease.level)
        counts.vram_hits += len(hits)
        # A partly resident expert goes first: the transfer of a whole one might evict it meanwhile.
        for key in (*partial, *missing):
            if key in self._transfers.moving:
                self._speculation.adopt(key)
            if key not in self._transfers.under_way or not self._take_over(key):
                self._missing.append(key)
        if self._scan:
            self._brought = came + missing

    def __next__(self) -> list[Lease]:
        """Hits, then arrivals."""
        ahead = self._speculation.candidates
        if self._current:
            self._release_current()
            if self._missing or ahead or self._compensators:
                self.advance()
        while not self._stopped:
            if DeferredInterrupt.pending:
                self._interrupt.check()
            if self._transfers.under_way or self._compensators:
                self._collect()
            if (self._hits or self._arrived) and (leases := self._ready()):
                self._current = leases
                if self._transfers.path.asynchronous and not self._transfers.launched.ordered:
                    self._transfers.path.hand_out(leases)
                return leases
            if not (self._awaited or self._missing or self._hits or self._arrived):
                break
            if self._missing or ahead or self._compensators:
                self.advance()
            if self._arrived and self._any_computable(self._arrived):
                continue
            self._await_any()
        raise StopIteration

    def _await_any(self) -> None:
        """Waits for a transfer, and starts one where none is under way."""
        transfers = self._transfers
        # Moves have blocks that a missing expert lacks.
        moving = transfers.moving.values() if self._missing else ()
        compensators = self._compensators.under_way if self._compensators else {}
        if not (transfers.under_way or moving or compensators):
            self._start_alone()
        transfers.await_done([*transfers.under_way.values(), *moving, *compensators.values()], CHECK_EVERY)

    def advance(self) -> None:
        """Starts demanded transfers, in disk order, as far as blocks are free; after the last, predicted ones."""
        if self._compensators:
            self._compensators.advance()
        while self._missing:
            if not self._start_first():
                return
        if self._speculation.candidates or self._speculation.flying:
            self._speculation.pump()

    def finish(self) -> None:
        """Ends every lease, and every transfer; transfers that have not begun never do. Idempotent.

        Failed reads of experts that are not wanted any more are not tried again.
        """
        self._stopped = True
        self._missing.clear()
        begun = list[Transfer]()
        if self._awaited:
            awaited = self._awaited.values()
            begun = [each for each in awaited if not (each.owner or self._transfers).cancel(each)]
            self._awaited.clear()
        if self._current:
            self._release_current()
        if self._hits or self._arrived:
            self._vram.release(*self._hits, *self._arrived)
            self._hits, self._arrived = [], []
        if begun:
            with GivingUp():
                for transfer in begun:
                    self._transfers.await_done((transfer,))
                    if lease := (transfer.owner or self._transfers).end_transfer(transfer):
                        self._vram.release(lease)
        if self._compensators:
            self._compensators.finish()
        if self._brought:
            self._vram.mark_evict_first(self._brought)

    def _take_over(self, key: ExpertKey) -> bool:
        """Waits for a transfer ahead instead of reading its expert again. Returns False where it is read now.

        A transfer that began at a lower level is waited for as well: only the missing planes are read then.
        """
        transfer = self._transfers.under_way[key]
        if transfer.reservation.level >= self._wanted[key]:
            self._transfers.workers.hasten(transfer)
        elif (transfer.owner or self._transfers).cancel(transfer):
            return False
        self._awaited[key] = transfer
        if self._compensators:
            self._compensators.want(key, transfer.reservation.level)
        return True

    def _any_computable(self, leases: Sequence[Lease]) -> bool:
        """Whether one of some leases has its compensator, or is computed without one."""
        return not self._compensators or any(map(self._compensators.has, leases))

    def _ready(self) -> list[Lease]:
        """Takes the leases that are ready now, with their compensators.

        An expert whose device copy is under way is ready only together with one that waits for its copy as well:
        its kernel would keep the other experts' kernels from starting.
        """
        leases, hits, still = self._hits, list[Lease](), list[Lease]()
        has = self._compensators.has if self._compensators else None
        if has:
            leases = [lease for lease in self._hits if has(lease)]
            hits = [lease for lease in self._hits if not has(lease)]
        waits = not leases
        for lease in self._arrived:
            now = waits or not lease.arriving or all(event.done() for event in lease.arriving)
            (leases if now and (not has or has(lease)) else still).append(lease)
        self._hits, self._arrived = hits, still
        return leases

    def _collect(self) -> None:
        """Ends every transfer that is done, and starts missing experts that ended below their level."""
        missing = len(self._missing)
        if self._compensators and (error := self._compensators.collect()):
            self.finish()
            raise error
        for transfer in list(self._transfers.under_way.values()):
            if transfer.done:
                self._arrival(transfer)
        if len(self._missing) > missing:
            self.advance()

    def _arrival(self, transfer: Transfer) -> None:
        """Ends a transfer that is done; its expert has arrived, or is missing still."""
        key = transfer.key
        if self._awaited.pop(key, None) is None:
            assert transfer.owner
            transfer.owner.land(transfer)
            return
        lease = (transfer.owner or self._transfers).end_transfer(transfer)
        if transfer.error and not transfer.owner:
            self.finish()
            raise transfer.error
        if lease and lease.level >= self._wanted[key]:
            self._counts.dram_hits += transfer.read == 0 and transfer.load.dram_alone
            self._arrived.append(lease)
            if self._compensators:
                self._compensators.want(key, lease.level)
            return
        if lease:
            self._vram.release(lease)
        self._add_missing(key)

    def _add_missing(self, key: ExpertKey) -> None:
        """Adds an expert that came below its level after the missing ones."""
        self._missing.append(key)

    def _give_up(self) -> bool:
        """Ends a lease that is not handed out yet, for the first missing expert. False: each is handed out at once."""
        return False

    def _release_current(self) -> None:
        """Ends the leases that were handed out last."""
        if self._transfers.path.asynchronous:
            self._transfers.path.computed()
        self._vram.release(*self._current)
        if self._compensators:
            self._compensators.release(self._current)
        self._current = []

    def _start_alone(self) -> None:
        """Starts the first transfer where nothing is under way or can be computed, and still no block was free.

        Experts that wait for their compensators come first. In a tier of one expert the transfer is a promotion, and
        its old block must go before its new one fits.
        """
        if self._compensators and (self._hits or self._arrived):
            self._compensators.start_alone()
            return
        key = self._missing[0]
        self._vram.drop(key)
        if not self._start_first():
            raise self._transfers.too_small(key, self._wanted[key])

    def _start_first(self) -> bool:
        """Starts the first missing expert's transfer, with blocks taken back from predictions and moves if need be."""
        key = self._missing[0]
        level = self._wanted[key]
        while (transfer := self._transfers.start(key, level, self._counts)) is None:
            freed = self._lookahead.yield_blocks(self._speculation)
            if not (freed or self._transfers.end_a_move(self._counts) or self._give_up()):
                return False
        self._missing.popleft()
        self._awaited[key] = transfer
        if self._compensators:
            self._compensators.want(key, level)
        return True
