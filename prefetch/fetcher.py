"""The expert source: a requested expert is resident, is being read ahead, or is read now.

    request    vram.acquire_all ── hit ───────────────────────────────────────────────────────► lease
                    │ miss
                    ├── read ahead: its transfer becomes a demand ─────────────────┐
                    │                                                              ▼
               path.load: reserve, lease ── worker: Load.run ── Load.end: vram.publish ───────► lease
                    ▲                                                              │
    read_ahead  blocks that no demand needs ── the same, behind every demand ──────┴─► resident

`transfers` has the transfers, `transfer_path` the paths of their bytes, `workers` the queue, `speculation` the
predictions, `lookahead_gate` whether they pay, `transitions` the changes of level that hold up no step, and
`layer_request` one layer's demands. `transfers` says what each thread may do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from edgemoe.cache.base import Observer
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.errors import DamagedData
from edgemoe.machine.device import Event
from edgemoe.machine.sigint import DeferredInterrupt
from edgemoe.prefetch.base import MODES, ExpertSource, PinnedExperts
from edgemoe.prefetch.compensators.leases import CompensatorLeases
from edgemoe.prefetch.compensators.tier import CompensatorTier
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.layer_request import LayerRequest
from edgemoe.prefetch.lookahead_gate import LookaheadGate
from edgemoe.prefetch.ram_path import RamPath
from edgemoe.prefetch.speculation import Speculation
from edgemoe.prefetch.transfer_path import TransferPath
from edgemoe.prefetch.transfers import Transfers
from edgemoe.prefetch.transitions import Transitions
from edgemoe.storage.base import ExpertKey, PlaneReader, ResidentForm
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
        form: of both tiers.
        reader: of the store. Not closed by this.
        path: between the tiers; None: both are in RAM (ram_path.RamPath).
        workers, scan_workers: threads that read and copy, and while a scan waits (workers.Workers).
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
        self._request: LayerRequest | None = None
        self._speculation = Speculation(self._transfers, gate or LookaheadGate())
        self._transitions = Transitions(self._transfers)

    def configure(self, look_ahead: str) -> None:
        """Sets what the requests that follow read ahead, at first nothing."""
        if look_ahead not in MODES:
            raise ValueError(f"expected a look-ahead mode of {', '.join(MODES)}, got {look_ahead!r}")
        self._speculation.mode = look_ahead

    @property
    def looks_ahead(self) -> bool:
        """Whether `read_ahead` has an effect now."""
        return self._speculation.on

    @property
    def scans_ahead(self) -> bool:
        """Whether `read_ahead` has an effect in a scan now."""
        return self._speculation.mode != "off"

    @property
    def predicting(self) -> bool:
        """Whether a prediction waits for the next layer's request or hits."""
        return self._speculation.pending

    @property
    def pinned(self) -> PinnedExperts:
        """The experts of `vram`."""
        return self

    def use_compensators(self, where: CompensatorTier | None) -> None:
        """Sets where compensators are kept and read."""
        self._add_compensators()
        self._compensators = self._transfers.beside(*where) if where else None

    def request(
        self,
        wanted: Mapping[ExpertKey, int],
        *,
        scan: bool = False,
        ordered: bool = False,
        compensated: Mapping[ExpertKey, int] | None = None,
    ) -> LayerRequest:
        """Brings the experts of `wanted`. Ctrl-C within the context is raised when the next list is taken, or by its
        end.

        Raises:
            ValueError: closed. Entering and iterating raise as ExpertSource.request.
        """
        if self._transfers.workers.closed:
            raise ValueError("expected an open fetcher, got a closed one")
        compensators = CompensatorLeases(self._compensators, compensated or {}, scan=scan)
        self._request = LayerRequest(
            self._transfers, self._speculation, wanted, scan=scan, ordered=ordered, compensators=compensators
        )
        return self._request

    def read_ahead(self, predicted: Mapping[ExpertKey, int], *, scan: bool = False) -> None:
        """Starts reading predicted experts. Without effect unless `looks_ahead`, or `scans_ahead` in a scan."""
        if self._request is None or not self._request.open:
            raise ValueError("expected an open request to read ahead in, got none")
        self._speculation.predict(predicted, scan=scan)
        self._request.advance()

    def observe(self, observer: Observer) -> None:
        """Calls `observer` for every resident expert of `vram`, and at every change."""
        self._vram.observe(observer)

    def observe_slower(self, observer: Observer) -> None:
        """Calls `observer` for every resident expert of `dram`, and at every change."""
        if self._transfers.dram:
            self._transfers.dram.observe(observer)

    def arriving(self, keys: Iterable[ExpertKey]) -> list[Event]:
        """Events behind the copies of resident experts."""
        return self._vram.arriving(keys)

    def count_hits(
        self,
        layers: Sequence[Sequence[tuple[ExpertKey, int]]],
        *,
        scan: bool = False,
        compensated: Sequence[ExpertKey] = (),
    ) -> None:
        """Counts experts that were computed without a request."""
        if self._transfers.path.asynchronous:
            self._transfers.path.computed()
        counts, passed = self._transfers.counts, len(layers)
        if self._speculation.pending:
            self._speculation.resolve(dict(layers[0]))
            passed -= 1
        self._speculation.pass_layers(passed)
        experts = [expert for layer in layers for expert in layer]
        self._transfers.count_requests([level for _, level in experts])
        counts.vram_hits += len(experts)
        if not scan:
            self._vram.clear_evict_first()
        # A request leases them in the order of their keys.
        self._vram.mark_used([key for layer in layers for key, _ in sorted(layer)])
        if self._compensators:
            if not scan:
                self._compensators.vram.clear_evict_first()
            self._compensators.vram.mark_used(compensated)

    def count_computed(self, levels: Mapping[tuple[int, int], int], layers: int) -> None:
        """Counts experts that were computed without a request, in `vram` or read in `dram`."""
        counts, bytes_at = self._transfers.counts, self._transfers.form.bytes_at
        for (own, wanted), experts in levels.items():
            self._transfers.count_requests([wanted] * experts)
            if own >= wanted:
                counts.vram_hits += experts
            else:
                counts.dram_hits += experts
                counts.dram_bytes += experts * (bytes_at(wanted) - (bytes_at(own) if own else 0))
        self._speculation.pass_layers(layers)
        self._vram.clear_evict_first()

    def mark_used(self, keys: Sequence[ExpertKey]) -> None:
        """Marks experts of `vram` as used."""
        self._vram.mark_used(keys)

    def count_predictions(self, layers: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> None:
        """Counts predictions for which there was nothing to read."""
        for layer, predicted, wanted in layers:
            self._transfers.counts.of_layer(layer).compare(predicted, wanted)

    def fill(self, keys: Sequence[ExpertKey], levels: Sequence[int], go_on: Callable[[], bool]) -> None:
        """Reads experts into free blocks, without predictions.

        A prompt that follows evicts the experts that it does not want, of the last layers first. What is read when only
        `dram` has free blocks passes through the same few blocks of `vram`.
        """
        self.release_pins()
        look_ahead = self._speculation.mode
        self.configure("off")
        tried: list[ExpertKey] = []
        try:
            for tier in (self._vram, self._transfers.dram):
                if tier:
                    rest = [key for key in keys if not (self._vram.level_of(key) or tier.level_of(key))]
                    self._fill(tier, rest, levels, go_on, tried)
        except DamagedData:
            pass
        finally:
            self._vram.mark_evict_first(sorted(tried, reverse=True))
            self.take_counts()
            self.configure(look_ahead)

    def _fill(
        self,
        tier: PlaneTier,
        rest: list[ExpertKey],
        levels: Sequence[int],
        go_on: Callable[[], bool],
        tried: list[ExpertKey],
    ) -> None:
        """Reads experts while a tier has free blocks, and adds them to `tried`."""
        for level in levels:
            most = max(BATCH_BYTES // self._transfers.form.bytes_at(level), 1)
            while go_on() and (now := rest[: min(most, tier.free_experts(level))]):
                tried += now
                del rest[: len(now)]
                with self.request(dict.fromkeys(now, level), scan=True) as request:
                    for _ in request:
                        if not go_on():
                            break

    def promote(self, wanted: Mapping[ExpertKey, int]) -> None:
        """Copies experts from `dram` into `vram`, without predictions."""
        self.release_pins()
        if self._transfers.path.asynchronous:
            self._transfers.path.computed()
        counts, self._transfers.counts = self._transfers.counts, TransferCounts()
        try:
            with LayerRequest(self._transfers, self._speculation, wanted) as request:
                for _ in request:
                    pass
        finally:
            moved, self._transfers.counts = self._transfers.counts, counts
            counts.dram_bytes += moved.dram_bytes
            counts.ssd_bytes += moved.ssd_bytes

    def change_levels(
        self, demote: Mapping[ExpertKey, int], promote: Mapping[ExpertKey, int], *, rate: float | None
    ) -> None:
        """Sets which experts of `vram` change their level in the background."""
        self._transitions.change(demote, promote, rate)

    def advance_changes(self, *, start: bool = True, settle: bool = False) -> None:
        """Publishes and starts changes of level."""
        if self._transitions.idle:
            return
        with DeferredInterrupt():
            if settle:
                self._transitions.settle()
            else:
                self._transitions.advance(start=start)

    def release_pins(self) -> None:
        """Ends predictions, changes of level, their reads and their leases."""
        if self._request and self._request.open:
            raise ValueError("expected no open request, got one")
        with DeferredInterrupt(), GivingUp():
            self._speculation.end()
            self._transitions.end()

    def resize(self, capacity: Mapping[str, int]) -> None:
        """Changes the number of blocks of `vram`, and takes or returns their memory."""
        self.release_pins()
        with DeferredInterrupt():
            self._vram.resize(capacity, self._transfers.path.spill)

    def take_counts(self) -> TransferCounts:
        """Returns the counters since the last call, and resets them."""
        self._add_compensators()
        return self._transfers.take_counts()

    def _add_compensators(self) -> None:
        """Adds the counters of compensators to those of experts."""
        if self._compensators:
            own = self._compensators.take_counts()
            own.compensator_bytes = own.ssd_bytes
            self._transfers.counts += own

    def close(self) -> None:
        """Waits for reads under way and ends the threads. Idempotent."""
        self.release_pins()
        self._transfers.close()
