"""An expert source whose steps and requests record when each expert was in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from edgemoe.bench.timeline import COMPUTE, NO_WAIT, WAIT, NothingPinned, Timeline
from edgemoe.cache.base import Lease
from edgemoe.prefetch.base import ExpertSource, PinnedExperts, Request, StepExperts
from edgemoe.prefetch.compensators.tier import CompensatorTier
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.storage.base import ExpertKey


class TimedRequest(Request):
    """Wraps a request; the time until its next list is a span on the wait lane, unless the list was ready."""

    def __init__(self, request: Request, timeline: Timeline, name: str) -> None:
        self._request, self._timeline, self._name = request, timeline, name

    def __next__(self) -> list[Lease]:
        """Takes the next list within a span."""
        start = self._timeline.clock()
        try:
            return next(self._request)
        finally:
            if self._timeline.clock() - start > NO_WAIT:
                self._timeline.add(WAIT, self._name, start)


class TimedStep(StepExperts):
    """Wraps a step's experts: requests are timed, and the work between two requests is a dense span."""

    def __init__(self, step: StepExperts, source: TimedSource, timeline: Timeline) -> None:
        self._step, self._source, self._timeline = step, source, timeline
        self.counts = step.counts

    @contextmanager
    def request(
        self,
        levels: Mapping[ExpertKey, int],
        *,
        scan: bool = False,
        ordered: bool = False,
        compensated: Mapping[ExpertKey, int] | None = None,
    ) -> Iterator[Request]:
        """Brings experts between two dense spans (StepExperts.request)."""
        self._source.dense_ends()
        layers = {key.layer for key in levels}
        name = f"for layer {', '.join(map(str, sorted(layers)))}"
        try:
            with self._step.request(levels, scan=scan, ordered=ordered, compensated=compensated) as request:
                yield TimedRequest(request, self._timeline, name)
        finally:
            self._source.dense_begins()

    @property
    def predicting(self) -> bool:
        """Whether the step has a prediction that waits."""
        return self._step.predicting

    def read_ahead(self, predicted: Mapping[ExpertKey, int], *, scan: bool = False) -> None:
        """Passes predicted experts on."""
        self._step.read_ahead(predicted, scan=scan)

    def count_hits(
        self,
        layers: Sequence[Sequence[tuple[ExpertKey, int]]],
        *,
        scan: bool = False,
        compensated: Sequence[ExpertKey] = (),
    ) -> None:
        """Counts nothing: without pins no layer runs without a request."""

    def count_computed(self, levels: Mapping[tuple[int, int], int], layers: int) -> None:
        """Counts nothing, as count_hits."""

    def count_predictions(self, layers: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> None:
        """Counts nothing, as count_hits: requests compare the predictions."""

    def end(self) -> None:
        """Ends the step."""
        self._step.end()


class TimedSource(ExpertSource):
    """Wraps a source: requests of its steps are timed, and the work between two requests is a dense span.

    `dense_begins` marks the start of a step's first dense span, and `dense_ends` the end of its last one.
    """

    def __init__(self, source: ExpertSource, timeline: Timeline) -> None:
        self._source, self._timeline = source, timeline
        self._since = timeline.clock()

    def dense_begins(self) -> None:
        """Marks the start of dense work: of a step, or after a request."""
        self._since = self._timeline.clock()

    def dense_ends(self) -> None:
        """Marks the end of the dense work since `dense_begins`."""
        self._timeline.add(COMPUTE, "dense", self._since)

    def begin(self) -> StepExperts:
        """Begins a step whose requests are timed."""
        return TimedStep(self._source.begin(), self, self._timeline)

    @property
    def pinned(self) -> PinnedExperts:
        """Pins no expert (NothingPinned)."""
        return NothingPinned()

    @property
    def looks_ahead(self) -> bool:
        """Whether the source reads predicted experts."""
        return self._source.looks_ahead

    @property
    def scans_ahead(self) -> bool:
        """Whether the source reads a scan's experts ahead."""
        return self._source.scans_ahead

    def configure(self, look_ahead: str) -> None:
        """Sets the source's look-ahead."""
        self._source.configure(look_ahead)

    def use_compensators(self, where: CompensatorTier | None) -> None:
        """Sets the source's tier of compensators."""
        self._source.use_compensators(where)

    def fill(self, keys: Sequence[ExpertKey], levels: Sequence[int], go_on: Callable[[], bool]) -> None:
        """Fills the source's free blocks."""
        self._source.fill(keys, levels, go_on)

    def promote(self, levels: Mapping[ExpertKey, int], counts: TransferCounts) -> None:
        """Passes experts to move to the source."""
        self._source.promote(levels, counts)

    def change_levels(
        self, demote: Mapping[ExpertKey, int], promote: Mapping[ExpertKey, int], *, rate: float | None
    ) -> None:
        """Passes changes of level to the source."""
        self._source.change_levels(demote, promote, rate=rate)

    def advance_changes(self, counts: TransferCounts, *, start: bool = True, settle: bool = False) -> None:
        """Publishes and starts changes of level of the source."""
        self._source.advance_changes(counts, start=start, settle=settle)

    def release_pins(self) -> None:
        """Releases the source's pins."""
        self._source.release_pins()

    def resize(self, capacity: Mapping[str, int]) -> None:
        """Changes the number of blocks of the source's fastest tier."""
        self._source.resize(capacity)

    def close(self) -> None:
        """Closes the source."""
        self._source.close()
