"""What is read before anybody asks for it, on a guess about the next layer, and what came of it.

    predict ── resident: pinned, no victim of its own ──────────────┐
       │ not                                                        ├─► resolve: used, cancelled or wasted
    candidates ── pump: room, and few on their way ── transfer ─────┘

A guess holds no demand up: room that a demand lacks is taken back from it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from cache.base import Lease
from prefetch.base import MODES
from prefetch.lookahead_gate import Judge
from prefetch.transfer import Transfer
from prefetch.transfers import Traffic
from storage.base import ExpertKey

BASE_LEVEL = 2
"""What mode `base` reads, and the lowest level that an expert can be resident at."""

PER_WORKER = 4
"""Transfers ahead that are under way at once, for each worker. The more of them, the longer the disk is busy without
the engine; the more, too, have evicted somebody when they turn out wrong and are cancelled."""


class Speculation:
    """The guess about the coming layer. Used by the engine's thread.

    Args:
        traffic: carries it out.
        judge: decides in mode `auto`.
        mode: one of MODES; may be set at any time.
    """

    def __init__(self, traffic: Traffic, judge: Judge, mode: str) -> None:
        self.mode = mode
        self._traffic, self._judge = traffic, judge
        self._limit = PER_WORKER * traffic.workers.count
        self._predicted: dict[ExpertKey, int] = {}
        self._candidates: deque[ExpertKey] = deque()
        self._flying: dict[ExpertKey, Transfer] = {}
        self._landed: dict[ExpertKey, Transfer] = {}
        self._pins: dict[ExpertKey, Lease] = {}
        self._hidden = self._wasted = 0

    @property
    def mode(self) -> str:
        """One of MODES."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} of the look-ahead: want one of {', '.join(MODES)}")
        self._mode = mode

    @property
    def on(self) -> bool:
        """Whether predictions are taken."""
        return self._mode != "off" and (self._mode != "auto" or self._judge.on)

    def predict(self, predicted: Mapping[ExpertKey, int]) -> None:
        """Adds to the guess, the likeliest first. Pins what is resident of it; `pump` starts the others."""
        if not self.on:
            return
        for key, level in predicted.items():
            if key in self._predicted:
                continue
            level = BASE_LEVEL if self._mode == "base" else level
            self._predicted[key] = level
            lease = self._traffic.vram.acquire(key, BASE_LEVEL)
            if lease:
                self._pins[key] = lease
            if lease is None or lease.level < level:
                self._candidates.append(key)

    def pump(self) -> None:
        """Starts as much of the guess as there is room for. Call it when no demand lacks room."""
        # One that is asked for is its stream's to settle.
        for transfer in [t for t in self._flying.values() if t.done and t.asked is None]:
            self.land(transfer)
        traffic = self._traffic
        while self._candidates and len(self._flying) < self._limit:
            key = self._candidates[0]
            level = self._predicted[key]
            # One that is under way was refuted or wanted before, or is the running layer's own.
            if key not in traffic.under_way and traffic.vram.level_of(key) < level:
                started = traffic.start(key, level, ahead=True)
                if started is None:
                    return
                self._flying[key] = started
                traffic.counts.speculated += 1
            self._candidates.popleft()

    def yield_room(self) -> bool:
        """Gives back, for a demand, the last of what is held for the guess. False: nothing, or it has begun."""
        for transfer in reversed(self._flying.values()):
            if transfer.asked is None and self.withdraw(transfer):
                return True
        if self._pins:
            self._traffic.vram.release(self._pins.popitem()[1])
            return True
        return False

    def resolve(self, wanted: Mapping[ExpertKey, int]) -> list[ExpertKey]:
        """The router has spoken. Ends the guess: all that is left of it is under way, wanted or begun.

        Returns:
            what is wanted and has come on it, whole.
        """
        asked = self._traffic.clock()
        self._compare(wanted)
        for transfer in [t for t in self._flying.values() if t.done]:
            self.land(transfer)
        used = []
        for key, transfer in self._landed.items():
            if key in wanted and self._held(key) >= min(wanted[key], transfer.reservation.level):
                self._count_used(transfer, asked)
                used += [key] if transfer.reservation.held is None else []
            else:
                self._count_wasted(transfer)
        for transfer in list(self._flying.values()):
            # A promotion beyond what is wanted and resident already is not asked for.
            if wanted.get(transfer.key, 0) > self._traffic.vram.level_of(transfer.key):
                transfer.asked = asked
            else:
                self.withdraw(transfer)
        self._forget()
        self._tell_judge()
        return used

    def settle(self, transfer: Transfer) -> Lease | None:
        """Ends a transfer of ours that is done, as Traffic.settle, and counts what it was good for."""
        key = transfer.key
        del self._flying[key]
        lease = self._traffic.settle(transfer)
        if lease:
            if transfer.asked is not None:
                self._count_used(transfer, transfer.asked)
            elif key in self._predicted:
                self._landed[key] = transfer
            else:
                self._count_wasted(transfer)
        return lease

    def land(self, transfer: Transfer) -> None:
        """Settles a transfer of ours that is done, for which nobody waits."""
        key, release = transfer.key, self._traffic.vram.release
        lease = self.settle(transfer)
        if lease and key in self._predicted:
            if old := self._pins.pop(key, None):
                release(old)
            self._pins[key] = lease
        elif lease:
            release(lease)

    def withdraw(self, transfer: Transfer) -> bool:
        """Whether a transfer of ours had not begun, as Traffic.withdraw."""
        withdrawn = self._traffic.withdraw(transfer)
        if withdrawn:
            del self._flying[transfer.key]
        return withdrawn

    def end(self) -> None:
        """Waits for what has begun, cancels the rest, and counts all that nobody has asked for as wasted."""
        for transfer in self._landed.values():
            self._count_wasted(transfer)
        self._forget()
        for transfer in [t for t in list(self._flying.values()) if not self.withdraw(t)]:
            self.land(self._traffic.next_done((transfer,)))

    def _forget(self) -> None:
        self._predicted.clear()
        self._candidates.clear()
        self._landed.clear()
        while self._pins:
            self._traffic.vram.release(self._pins.popitem()[1])

    def _held(self, key: ExpertKey) -> int:
        """The level that memory has of an expert, in whichever tier."""
        dram = self._traffic.dram
        return max(self._traffic.vram.level_of(key), dram.level_of(key) if dram else 0)

    def _compare(self, wanted: Mapping[ExpertKey, int]) -> None:
        """Counts recall and precision, of the layers that were guessed at and came."""
        if not self._predicted:
            return
        came = Counter(key.layer for key in wanted)
        for layer, guessed in Counter(key.layer for key in self._predicted).items():
            if layer in came:
                counts = self._traffic.counts.of_layer(layer)
                counts.predicted += guessed
                counts.wanted += came[layer]
                counts.right += sum(key.layer == layer and key in wanted for key in self._predicted)

    def _count_used(self, transfer: Transfer, asked: float) -> None:
        counts = self._traffic.counts
        counts.speculated_used += 1
        layer, hidden = counts.of_layer(transfer.key.layer), transfer.hidden_bytes(asked)
        layer.hidden_bytes += hidden
        layer.hidden_s += transfer.hidden_s(asked)
        self._hidden += hidden

    def _count_wasted(self, transfer: Transfer) -> None:
        self._traffic.counts.of_layer(transfer.key.layer).wasted_bytes += transfer.moved
        self._wasted += transfer.moved

    def _tell_judge(self) -> None:
        if self._mode != "auto":
            return
        counts, was_on = self._traffic.counts, self._judge.on
        counts.auto_resting += not was_on
        self._judge.layer(self._hidden, self._wasted)
        counts.auto_off += was_on and not self._judge.on
        self._hidden = self._wasted = 0
