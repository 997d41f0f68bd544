"""The expert source: what a layer asks for is pinned, or was read ahead, or is read now.

    stream     vram.acquire ── hit ───────────────────────────────────────────────────────► lease
                    │ miss
                    ├── a guess is bringing it: its transfer becomes a demand ─────┐
                    │                                                              ▼
               route.load: reserve, pin ── worker: Load.run ── Load.end: vram.publish ────► lease
                    ▲                                                              │
    speculate  room that no demand wants ── the same, behind every demand ─────────┴─► resident

`traffic` has the transfers, `route` the ways that bytes take, `workers` the queue, `speculation` the guesses and
`judge` whether they pay, `stream` one layer's demands. Which thread may do what is said in `traffic`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from cache.base import Lease, Tier
from prefetch.base import ExpertSource, Leases, Split, TransferCounts
from prefetch.layer_request import LayerStream
from prefetch.lookahead_gate import Judge
from prefetch.ram_path import ExclusiveRoute
from prefetch.sigint import deferred_interrupt
from prefetch.speculation import Speculation
from prefetch.transfer_path import Route
from prefetch.transfers import Traffic
from storage.base import ExpertKey, PlaneReader, ResidentForm


class Fetcher(ExpertSource):
    """See ExpertSource. One stream at a time; while one is open, nobody else changes the tiers.

    Between two streams the tiers may be changed after `settle`.

    Args:
        vram: the tier that leases are on.
        dram: a slower tier in the same form, or None.
        form: of both tiers.
        reader: of the store. Not closed by this.
        route: between the tiers; None: both are in RAM, see exclusive.ExclusiveRoute.
        workers, bulk: threads that read and copy, and while much waits (workers.Workers).
        speculate: one of base.MODES.
        roomy: whether `vram` has room for every expert of the model at every level asked for, so that none is ever
            evicted. Whoever asks for higher levels than that makes another fetcher.
        judge: decides in mode `auto`; None: one with its own defaults.
        clock: seconds, never going back.

    Raises:
        ValueError: workers is below 1, or no such mode.
    """

    def __init__(
        self,
        vram: Tier,
        dram: Tier | None,
        form: ResidentForm,
        reader: PlaneReader,
        *,
        route: Route | None = None,
        workers: int = 4,
        bulk: int = 0,
        speculate: str = "off",
        roomy: bool = False,
        judge: Judge | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        route = route or ExclusiveRoute(vram, dram, form)
        self._traffic = Traffic(vram, dram, route, form, reader, workers=workers, bulk=bulk, clock=clock)
        self._stream: LayerStream | None = None
        self._roomy, self._held, self._holds = roomy, list[Lease](), 0
        self.split: Split | None = None
        """Which experts stay in the slower tier from the next stream on, for who can compute them there; None: none."""
        try:
            self._speculation = Speculation(self._traffic, judge or Judge(), speculate)
        except ValueError:
            self._traffic.close()
            raise

    @property
    def mode(self) -> str:
        """One of base.MODES; may be set at any time, for the predictions that follow."""
        return self._speculation.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._speculation.mode = mode

    @property
    def looks_ahead(self) -> bool:
        """See ExpertSource."""
        return self._speculation.on

    @contextmanager
    def stream(self, wanted: Mapping[ExpertKey, int], *, passing: bool = False) -> Iterator[Leases]:
        """See ExpertSource.

        An error that is met only while the context is being left early is not raised: nobody waits for
        that expert any more, and it is read again when it is next asked for. Ctrl-C within the context is
        raised when the next lease is asked for, or by its end.

        Raises:
            DamagedData: as ExpertSource.stream.
            DoesNotFit: the tier cannot hold one expert at the asked level.
            ValueError: closed.
        """
        if self._traffic.workers.closed:
            raise ValueError("the fetcher is closed")
        with deferred_interrupt() as interrupt:
            stream = self._stream = LayerStream(
                self._traffic, self._speculation, wanted, interrupt, self.split, passing=passing
            )
            try:
                stream.begin()
                yield stream
            except BaseException:
                stream.finish()
                self._speculation.end()
                raise
            finally:
                self._stream = None
                stream.finish()

    def speculate(self, predicted: Mapping[ExpertKey, int]) -> None:
        """See ExpertSource. Without effect unless `looks_ahead`."""
        if self._stream is None:
            raise ValueError("no stream is open to speculate in")
        self._speculation.predict(predicted)
        self._stream.advance()

    def hold(self, key: ExpertKey, level: int) -> Lease | None:
        """See ExpertSource."""
        lease = self._traffic.vram.acquire(key, level) if self._roomy else None
        if lease:
            self._held.append(lease)
        return lease

    @property
    def roomy(self) -> bool:
        """See ExpertSource."""
        return self._roomy

    def count_held(self, levels: Sequence[int]) -> None:
        """See ExpertSource."""
        counts = self._traffic.counts
        counts.ask(levels)
        counts.vram_hits += len(levels)

    @property
    def holds(self) -> int:
        """See ExpertSource."""
        return self._holds

    def settle(self) -> None:
        """See ExpertSource.

        Raises:
            ValueError: a stream is open.
        """
        if self._stream:
            raise ValueError("a stream is open")
        with deferred_interrupt():
            self._holds += 1
            while self._held:
                self._traffic.vram.release(self._held.pop())
            self._speculation.end()

    def take_counts(self) -> TransferCounts:
        """See ExpertSource."""
        taken, self._traffic.counts = self._traffic.counts, TransferCounts()
        return taken

    def close(self) -> None:
        """See ExpertSource."""
        self.settle()
        self._traffic.close()
