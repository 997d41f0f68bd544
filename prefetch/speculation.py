"""Experts read before the request for them, on a prediction of the next layer, and their outcome.

    predict ── resident: leased, so that it is no victim ─────────────────┐
       │ not                                                              ├─► resolve: used, cancelled or wasted
    candidates ── pump: free blocks, and few transfers ── transfer ───────┘

A prediction delays no demand: blocks that a demand lacks are taken back from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from edgemoe.cache.base import Lease
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.lookahead import Lookahead
from edgemoe.prefetch.transfers import Transfer, Transfers
from edgemoe.storage.base import ExpertKey

BASE_LEVEL = 2
"""The level that mode `base` reads: the lowest at which an expert can be resident."""

PER_WORKER = 4
"""Transfers ahead that are under way at once, for each worker. More of them keep the disk busy for longer without the
engine, and more of them have evicted an expert when they turn out wrong and are cancelled."""

IN_A_SCAN = 64
"""Transfers ahead of a scan that are under way at once: they keep the disk busy while a long prompt's attention is
computed, and nearly all of them are wanted."""


class Speculation:
    """A step's prediction of its next layer, and the transfers of it. Used by the engine's thread.

    Other steps may run between two layers of the step: the prediction and its transfers stay.

    Args:
        transfers: runs them.
        lookahead: the mode, gate and list that all steps' predictions share.
        counts: the counters of the step.

    Attributes:
        predicted: experts of the prediction that has not been resolved -> their levels.
        candidates: predicted experts whose transfers have not started, the next first.
        flying: the transfers under way.
    """

    def __init__(self, transfers: Transfers, lookahead: Lookahead, counts: TransferCounts) -> None:
        self._transfers, self._lookahead, self._counts = transfers, lookahead, counts
        self._limit, self._scan = PER_WORKER * transfers.workers.count, False
        self.predicted: dict[ExpertKey, int] = {}
        self.candidates: deque[ExpertKey] = deque()
        self.flying: dict[ExpertKey, Transfer] = {}
        self._landed: dict[ExpertKey, Transfer] = {}
        self._pins: dict[ExpertKey, Lease] = {}
        self._hidden = self._wasted = 0

    def predict(self, predicted: Mapping[ExpertKey, int], *, scan: bool = False) -> None:
        """Adds to the prediction, the likeliest first, or in a scan in the order of keys.

        Leases its resident experts; `pump` starts the others.
        """
        if not (self._lookahead.on or (scan and self._lookahead.mode != "off")):
            return
        self._scan = scan
        if scan:
            predicted = dict(sorted(predicted.items()))
        new = {
            key: BASE_LEVEL if self._lookahead.mode == "base" else level
            for key, level in predicted.items()
            if key not in self.predicted
        }
        self.predicted |= new
        resident = self._transfers.vram.acquire_all(dict.fromkeys(new, BASE_LEVEL), predicted=True).hits
        self._pins |= {lease.key: lease for lease in resident}
        at_hand = {lease.key for lease in resident if lease.level >= new[lease.key]}
        self.candidates += [key for key in new if key not in at_hand]

    def pump(self) -> None:
        """Starts predicted transfers while blocks are free. Called when no demand lacks blocks."""
        # A transfer whose expert is requested is ended by its request.
        for transfer in list(self.flying.values()):
            if transfer.done and transfer.requested is None:
                self.land(transfer)
        transfers = self._transfers
        limit = max(self._limit, IN_A_SCAN) if self._scan else self._limit
        while self.candidates and len(self.flying) < limit:
            key = self.candidates[0]
            level = self.predicted[key]
            # A transfer under way belongs to an earlier prediction or to the running layer, a moving one to neither.
            if (
                not (key in transfers.under_way or key in transfers.moving)
                and transfers.vram.level_of(key) < level
            ):
                started = transfers.start(key, level, self._counts, ahead_of=self)
                if started is None:
                    return
                self.flying[key] = started
                self._counts.speculated += 1
            self.candidates.popleft()

    def yield_blocks(self) -> bool:
        """Frees the least likely expert's blocks for a demand. Returns False where every read has begun."""
        for transfer in reversed(self.flying.values()):
            if transfer.requested is None and self.cancel(transfer):
                return True
        if self._pins:
            self._transfers.vram.release(self._pins.popitem()[1])
            return True
        return False

    def resolve(self, levels: Mapping[ExpertKey, int]) -> list[ExpertKey]:
        """Ends the prediction with the layer's choice. A read goes on if its expert is wanted, or if it has begun.

        Returns:
            the wanted experts that came whole on the prediction.
        """
        requested = self._transfers.clock()
        if self.predicted:
            self._compare(levels)
        for transfer in list(self.flying.values()):
            if transfer.done:
                self.land(transfer)
        used = []
        for key, transfer in self._landed.items():
            if key in levels and self._level_in_memory(key) >= min(levels[key], transfer.reservation.level):
                self._count_used(transfer, requested)
                used += [key] if transfer.reservation.lease is None else []
            else:
                self._count_wasted(transfer)
        for transfer in list(self.flying.values()):
            # A promotion beyond what is wanted and resident already is not wanted.
            if levels.get(transfer.key, 0) > self._transfers.vram.level_of(transfer.key):
                transfer.requested = requested
            else:
                self.cancel(transfer)
        if self.predicted or self._landed or self._pins:
            self._forget()
        if self._lookahead.mode == "auto":
            self._lookahead.judge(self._counts, self._hidden, self._wasted)
        self._hidden = self._wasted = 0
        return used

    def adopt(self, key: ExpertKey) -> None:
        """Takes over a move whose expert is requested now: the move counts as a read ahead."""
        transfer = self.flying[key] = self._transfers.adopt(key, self._counts, self)
        transfer.requested = self._transfers.clock()
        self._counts.speculated += 1

    def end_transfer(self, transfer: Transfer) -> Lease | None:
        """Ends a transfer ahead that is done, as Transfers.end_transfer, and counts its use."""
        key = transfer.key
        del self.flying[key]
        lease = self._transfers.end_transfer(transfer)
        if lease:
            if transfer.requested is not None:
                self._count_used(transfer, transfer.requested)
            elif key in self.predicted:
                self._landed[key] = transfer
            else:
                self._count_wasted(transfer)
        return lease

    def land(self, transfer: Transfer) -> None:
        """Ends a transfer ahead that is done and not requested."""
        key, release = transfer.key, self._transfers.vram.release
        lease = self.end_transfer(transfer)
        if lease and key in self.predicted:
            if old := self._pins.pop(key, None):
                release(old)
            self._pins[key] = lease
        elif lease:
            release(lease)

    def cancel(self, transfer: Transfer) -> bool:
        """Cancels a transfer ahead, as Transfers.cancel. Returns whether it had not begun."""
        cancelled = self._transfers.cancel(transfer)
        if cancelled:
            del self.flying[transfer.key]
        return cancelled

    def take_over(self, transfers: Iterable[Transfer]) -> None:
        """Takes over unwanted reads that an earlier step has left under way: their bytes count in this step."""
        for transfer in transfers:
            transfer.counts, transfer.owner = self._counts, self
            self.flying[transfer.key] = transfer

    def leave(self) -> list[Transfer]:
        """Ends the prediction with its step. Returns the reads that are still under way, which no layer wants."""
        for transfer in self._landed.values():
            self._count_wasted(transfer)
        self._forget()
        left = [transfer for transfer in list(self.flying.values()) if not self.cancel(transfer)]
        self.flying.clear()
        return left

    def end(self) -> None:
        """Cancels transfers, waits for begun ones, and counts every transfer as wasted that no layer requested."""
        for transfer in self._landed.values():
            self._count_wasted(transfer)
        self._forget()
        for transfer in [t for t in list(self.flying.values()) if not self.cancel(t)]:
            self._transfers.await_done((transfer,))
            self.land(transfer)

    def _forget(self) -> None:
        self.predicted.clear()
        self.candidates.clear()
        self._landed.clear()
        while self._pins:
            self._transfers.vram.release(self._pins.popitem()[1])

    def _level_in_memory(self, key: ExpertKey) -> int:
        """The higher of an expert's levels in both tiers."""
        dram = self._transfers.dram
        return max(self._transfers.vram.level_of(key), dram.level_of(key) if dram else 0)

    def _compare(self, levels: Mapping[ExpertKey, int]) -> None:
        """Counts recall and precision of the layers that were predicted and came."""
        for layer in {key.layer for key in self.predicted} & {key.layer for key in levels}:
            predicted, came = (
                [key.expert for key in keys if key.layer == layer] for keys in (self.predicted, levels)
            )
            self._counts.of_layer(layer).compare(predicted, came)

    def _count_used(self, transfer: Transfer, requested: float) -> None:
        self._counts.speculated_used += 1
        layer, hidden = self._counts.of_layer(transfer.key.layer), transfer.hidden_bytes(requested)
        layer.hidden_bytes += hidden
        layer.hidden_s += transfer.hidden_s(requested)
        self._hidden += hidden

    def _count_wasted(self, transfer: Transfer) -> None:
        self._counts.of_layer(transfer.key.layer).wasted_bytes += transfer.moved
        self._wasted += transfer.moved

    def pass_layers(self, layers: int) -> None:
        """Counts layers that ran without a prediction, or with one for which there was nothing to read."""
        while layers and self._lookahead.mode == "auto":
            # Within `together` layers the gate turns neither on nor off.
            together = min(layers, self._lookahead.gate.resting or 1)
            self._lookahead.judge(self._counts, self._hidden, self._wasted, together)
            self._hidden = self._wasted = 0
            layers -= together


def end_predictions(
    transfers: Transfers, lookahead: Lookahead, counts: TransferCounts, unwanted: list[Transfer]
) -> None:
    """Ends the predictions of all steps, and waits for the reads that earlier steps have left under way.

    Args:
        transfers: run them.
        lookahead: the predictions.
        counts: the counters of the reads left under way.
        unwanted: these reads; empty afterwards.
    """
    lookahead.end()
    final = Speculation(transfers, lookahead, counts)
    final.take_over(unwanted)
    unwanted.clear()
    final.end()
