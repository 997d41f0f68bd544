"""The expert source: a requested expert is resident, is being read ahead, or is read now.

    request    vram.acquire_all ── hit ───────────────────────────────────────────────────────► lease
                    │ miss
                    ├── read ahead: its transfer becomes a demand ─────────────────┐
                    │                                                              ▼
               path.load: reserve, lease ── worker: Load.run ── Load.end: vram.publish ───────► lease
                    ▲                                                              │
    read_ahead  blocks that no demand needs ── the same, after every demand ──────┴─► resident

`step` has the requests of one step and its counters, `layer_request` one layer's demands, `speculation` a step's
prediction of its next layer, and `lookahead` what the predictions of all steps share and whether they pay. `transfers`
has the transfers and says what each thread may do, `transfer_path` the paths of their bytes, `workers` the queue, and
`transitions` the changes of level that hold up no step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from edgemoe.cache.base import Observer
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.errors import DamagedData
from edgemoe.machine.device import Event
from edgemoe.machine.sigint import DeferredInterrupt
from edgemoe.prefetch.base import ExpertSource, PinnedExperts
from edgemoe.prefetch.compensators.tier import CompensatorTier
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.lookahead import Lookahead, LookaheadGate
from edgemoe.prefetch.ram_path import RamPath
from edgemoe.prefetch.speculation import end_predictions
from edgemoe.prefetch.step import FetcherStep
from edgemoe.prefetch.transfer_path import TransferPath
from edgemoe.prefetch.transfers import Transfer, Transfers
from edgemoe.prefetch.transitions import Transitions
from edgemoe.storage.base import LEVELS, ExpertKey, PlaneReader, ResidentForm
from edgemoe.storage.files.retry import GivingUp

BATCH_BYTES = 1 << 26
"""Bytes per warm-up batch: keeps all readers busy, bounds the delay of an arriving request."""


class Fetcher(ExpertSource, PinnedExperts):
    """Implements ExpertSource over one or two tiers. One request at a time; while it is open, only it changes the
    tiers.

    Between two requests the tiers may be changed after `release_pins`.

    Args:
        vram: the tier that leases are on.
        dram: a slower tier in the same form, or None.
        form: the form of experts in both tiers.
        reader: reads the store; it is not closed here.
        path: moves experts between the tiers; None: both tiers are in RAM (ram_path.RamPath).
        workers, scan_workers: number of threads that read and copy, and number while a scan waits (workers.Workers).
        gate: decides in mode `auto`; None: one with its own defaults.
        clock: seconds, never going back.

    Raises:
        ValueError: workers is below 1.
    """

    def __init__(
        self,
        vram: PlaneTier,
        dram: PlaneTier | None,
        form: ResidentForm,
        reader: PlaneReader,
        *,
        path: TransferPath | None = None,
        workers: int = 4,
        scan_workers: int = 0,
        gate: LookaheadGate | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        path = path or RamPath(vram, dram, form)
        self._vram = vram
        self._transfers = Transfers(
            vram, dram, path, form, reader, workers=workers, scan_workers=scan_workers, clock=clock
        )
        self._compensators: Transfers | None = None
        self._lookahead = Lookahead(gate or LookaheadGate())
        self._transitions = Transitions(self._transfers)
        self.launched = self._transfers.launched
        self._between = TransferCounts()
        """Counts of moves outside of all steps, since the last step began."""
        self._left: list[Transfer] = []
        """Reads under way that the step which started them did not want in the end."""

    def configure(self, look_ahead: str) -> None:
        """Sets what the requests that follow read ahead, at first nothing."""
        self._lookahead.configure(look_ahead)

    @property
    def looks_ahead(self) -> bool:
        """Whether `read_ahead` has an effect now."""
        return self._lookahead.on

    @property
    def scans_ahead(self) -> bool:
        """Whether `read_ahead` has an effect in a scan now."""
        return self._lookahead.mode != "off"

    @property
    def pinned(self) -> PinnedExperts:
        """The experts of `vram`."""
        return self

    def use_compensators(self, where: CompensatorTier | None) -> None:
        """Sets where compensators are kept and read."""
        self._compensators = self._transfers.of_compensators(*where) if where else None

    def begin(self) -> FetcherStep:
        """Begins a step, which takes over what has moved since the last one."""
        counts, self._between = self._between, TransferCounts()
        return self._begin(counts)

    def _begin(self, counts: TransferCounts) -> FetcherStep:
        left, ended = list(self._left), self._left.extend
        self._left.clear()
        return FetcherStep(self._transfers, self._compensators, self._lookahead, counts, left, ended)

    def observe(self, observer: Observer) -> None:
        """Calls `observer` for every resident expert of `vram`, and at every change."""
        self._vram.observe(observer)

    def observe_slower(self, observer: Observer) -> None:
        """Calls `observer` for every resident expert of `dram`, and at every change."""
        if self._transfers.dram:
            self._transfers.dram.observe(observer)

    def arriving(self, keys: Iterable[ExpertKey]) -> list[Event]:
        """Events that are recorded after the copies that fill resident experts' blocks."""
        return self._vram.arriving(keys)

    def mark_used(self, keys: Sequence[ExpertKey]) -> None:
        """Marks experts of `vram` as used."""
        self._vram.mark_used(keys)

    def fill(self, keys: Sequence[ExpertKey], levels: Sequence[int], go_on: Callable[[], bool]) -> None:
        """Reads experts into free blocks, without predictions.

        A prompt that follows evicts the experts that it does not want, of the last layers first. What is read when only
        `dram` has free blocks passes through the same few blocks of `vram`.
        """
        self.release_pins()
        look_ahead = self._lookahead.mode
        self.configure("off")
        tried: list[ExpertKey] = []
        step = self._begin(TransferCounts())  # not counted
        try:
            for tier in (self._vram, self._transfers.dram):
                if tier:
                    rest = [key for key in keys if not (self._vram.level_of(key) or tier.level_of(key))]
                    self._fill(step, tier, rest, levels, go_on, tried)
        except DamagedData:
            pass
        finally:
            self._vram.mark_evict_first(sorted(tried, reverse=True))
            step.end()
            self.configure(look_ahead)

    def _fill(
        self,
        step: FetcherStep,
        tier: PlaneTier,
        rest: list[ExpertKey],
        levels: Sequence[int],
        go_on: Callable[[], bool],
        tried: list[ExpertKey],
    ) -> None:
        """Reads experts while a tier has free blocks, and adds them to `tried`."""
        form = self._transfers.form
        # Layers with lower levels than others need fewer kinds of blocks.
        pairs = [(level, layer_level) for level in levels for layer_level in LEVELS if layer_level <= level]
        for level, own in pairs:
            of_level = [key for key in rest if form.level_in(key.layer, level) == own]
            most = max(BATCH_BYTES // form.bytes_at(own), 1) if own else 0
            while go_on() and (now := of_level[: min(most, tier.free_experts(own))]):
                tried += now
                del of_level[: len(now)]
                gone = {*now}
                rest[:] = [key for key in rest if key not in gone]
                with step.request(dict.fromkeys(now, own), scan=True) as request:
                    for _ in request:
                        if not go_on():
                            break

    def promote(self, levels: Mapping[ExpertKey, int], counts: TransferCounts) -> None:
        """Copies experts from `dram` into `vram`, without predictions; adds their bytes to `counts`."""
        with self.launched.in_order():
            self._transfers.require_no_request()
            with DeferredInterrupt(), GivingUp():
                end_predictions(self._transfers, self._lookahead, self._between, self._left)
            if self._transfers.path.asynchronous:
                self._transfers.path.computed()
            step = self._begin(TransferCounts())
            try:
                with step.request(levels) as request:
                    for _ in request:
                        pass
            finally:
                step.end()
                counts.dram_bytes += step.counts.dram_bytes
                counts.ssd_bytes += step.counts.ssd_bytes

    def change_levels(
        self, demote: Mapping[ExpertKey, int], promote: Mapping[ExpertKey, int], *, rate: float | None
    ) -> None:
        """Sets which experts of `vram` change their level in the background."""
        self._transitions.change(demote, promote, rate)

    def advance_changes(self, counts: TransferCounts, *, start: bool = True, settle: bool = False) -> None:
        """Publishes and starts changes of level."""
        if self._transitions.idle:
            return
        # Work that was launched before may read the blocks that become free: copies into them begin after it. No
        # block of the second tier becomes free.
        if self._transfers.path.asynchronous:
            self._transfers.path.computed()
        with DeferredInterrupt():
            if settle:
                self._transitions.settle(counts)
            else:
                self._transitions.advance(counts, start=start)

    def release_pins(self) -> None:
        """Ends predictions, changes of level, their reads and their leases."""
        if self.launched.waits:
            self.launched.settle()
        self._transfers.require_no_request()
        with DeferredInterrupt(), GivingUp():
            end_predictions(self._transfers, self._lookahead, self._between, self._left)
            self._transitions.end(self._between)

    def resize(self, capacity: Mapping[str, int]) -> None:
        """Changes the number of blocks of `vram`, and takes or returns their memory."""
        self.release_pins()
        with DeferredInterrupt():
            self._vram.resize(capacity, self._transfers.path.spill)

    def close(self) -> None:
        """Waits for reads under way and ends the threads. Idempotent."""
        self.release_pins()
        self.launched.clear()
        self._transfers.close()
