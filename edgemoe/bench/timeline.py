"""Who worked when: spans of disk, copies and computing, written as a trace for a viewer.

Chrome's trace format: open the file in `chrome://tracing` or https://ui.perfetto.dev. A process of the trace is a
tier, a thread of it one of ours: readers work side by side on the lane "SSD", what they do to bytes in memory is
on "copy". The engine's steps are on "compute", and in them what is dense (attention, norms, routers, the head) and
the experts, as many as were computed in one call; on "wait" is when its thread had nothing to compute, because no
expert was there yet. Where "SSD" and "compute" are busy at once, reading is hidden; "wait" is what was not.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cache.base import Lease
from edgemoe.kernels.base import Activation, ExpertKernel, Part, TokenKernel
from prefetch.base import ExpertSource, Leases, TransferCounts
from storage.base import Blocks, ExpertKey, Plane, PlaneReader, ResidentForm, Source

LANES = ("compute", "wait", "copy", "SSD")
COMPUTE, WAIT, COPY, SSD = LANES

NO_WAIT = 20_000
"""Nanoseconds that handing out an expert takes where nobody waited for it: no span is made of that."""


@dataclass(frozen=True)
class Span:
    """Work of one thread, from start to end in nanoseconds of one clock."""

    group: str
    lane: str
    thread: str
    name: str
    start: int
    end: int
    details: dict[str, int]


@dataclass
class Timeline:
    """Collects spans; any thread may add one.

    Args:
        clock: returns nanoseconds.
        group: prefix of the lanes of the spans that follow: the name of a benchmark's row.
        spans: in the order of their ends.
    """

    clock: Callable[[], int] = time.perf_counter_ns
    group: str = ""
    spans: list[Span] = field(default_factory=list)

    def add(self, lane: str, name: str, start: int, **details: int) -> None:
        """Adds a span of the calling thread on a lane, from `start` (nanoseconds of the clock) until now."""
        thread = threading.current_thread().name
        self.spans.append(Span(self.group, lane, thread, name, start, self.clock(), details))

    @contextmanager
    def span(self, lane: str, name: str, **details: int) -> Iterator[None]:
        """Adds a span on a lane for as long as the context is open, also where it ends in an error."""
        start = self.clock()
        try:
            yield
        finally:
            self.add(lane, name, start, **details)

    def as_json(self) -> dict[str, Any]:
        """Returns the spans in Chrome's trace format: complete events, in microseconds from the first start."""
        begin = min((span.start for span in self.spans), default=0)
        lanes = {(span.group, span.lane): 0 for span in self.spans}
        groups = list(dict.fromkeys(group for group, _ in lanes))
        order = sorted(lanes, key=lambda lane: (groups.index(lane[0]), LANES.index(lane[1])))
        processes = {lane: number for number, lane in enumerate(order, 1)}
        threads = {name: i for i, name in enumerate(sorted({span.thread for span in self.spans}), 1)}
        events: list[dict[str, Any]] = []
        for (group, lane), pid in processes.items():
            name = f"{group}: {lane}" if group else lane
            events.append(_metadata("process_name", pid, 0, {"name": name}))
            events.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
            used = {span.thread for span in self.spans if (span.group, span.lane) == (group, lane)}
            events += [_metadata("thread_name", pid, threads[t], {"name": t}) for t in sorted(used)]
        events += [
            {
                "ph": "X",
                "name": span.name,
                "cat": span.lane,
                "pid": processes[span.group, span.lane],
                "tid": threads[span.thread],
                "ts": (span.start - begin) / 1000,
                "dur": (span.end - span.start) / 1000,
                "args": span.details,
            }
            for span in self.spans
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write(self, path: Path) -> None:
        """Writes the trace as a JSON file."""
        path.write_text(json.dumps(self.as_json()), encoding="utf-8")


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


class TimedReader(PlaneReader):
    """Another reader, whose reads are spans on the SSD lane, and the time between them spans on the copy lane.

    Made for one transfer, in its thread: what happens to its bytes before, between and after the reads is
    copying from other tiers and merging planes. `finish` ends the last of these spans.
    """

    def __init__(self, reader: PlaneReader, timeline: Timeline, name: str) -> None:
        self._reader, self._timeline, self._name = reader, timeline, name
        self._since = timeline.clock()

    def read(self, key: ExpertKey, first: Plane, last: Plane, into: Sequence[memoryview]) -> int:
        """See PlaneReader."""
        self.finish()
        planes = "+".join(Plane(i).label for i in range(first, last + 1))
        with self._timeline.span(SSD, f"{self._name} {planes}", bytes=sum(map(len, into))):
            read = self._reader.read(key, first, last, into)
        self._since = self._timeline.clock()
        return read

    def finish(self) -> None:
        """Records what was done in memory since the last read."""
        self._timeline.add(COPY, self._name, self._since)

    def close(self) -> None:
        """See PlaneReader."""
        self._reader.close()


class TimedForm(ResidentForm):
    """Another form, whose fills are spans. Put it in the place of a StoreModel's form."""

    def __init__(self, form: ResidentForm, timeline: Timeline) -> None:
        self._form, self._timeline = form, timeline
        self.kinds = form.kinds

    def rewritten(self, held: int, level: int) -> tuple[str, ...]:
        """See ResidentForm."""
        return self._form.rewritten(held, level)

    def fill(
        self, reader: PlaneReader, key: ExpertKey, level: int, into: Blocks, source: Source | None
    ) -> int:
        """See ResidentForm."""
        timed = TimedReader(reader, self._timeline, f"layer {key.layer} expert {key.expert}")
        read = self._form.fill(timed, key, level, into, source)
        timed.finish()
        return read


class TimedKernel:
    """Another kernel, whose calls are spans on the compute lane."""

    def __init__(self, kernel: ExpertKernel, timeline: Timeline) -> None:
        self._kernel, self._timeline = kernel, timeline

    def forward(self, x: torch.Tensor, parts: Sequence[Part], gate: Activation) -> torch.Tensor:
        """See ExpertKernel."""
        levels = Counter(part.level for part in parts)
        counts = {f"at_{level}": count for level, count in levels.items()}
        with self._timeline.span(COMPUTE, "experts", rows=x.shape[0], **counts):
            return self._kernel.forward(x, parts, gate)


class TimedTokenKernel(TimedKernel):
    """The same of a TokenKernel."""

    def __init__(self, kernel: TokenKernel, timeline: Timeline) -> None:
        super().__init__(kernel, timeline)
        self._of_token = kernel

    def takes(self, gate: Activation) -> bool:
        """See TokenKernel."""
        return self._of_token.takes(gate)

    def prepared(self, blocks: Blocks, level: int) -> tuple[object, int]:
        """See TokenKernel."""
        return self._of_token.prepared(blocks, level), level

    def into(self, x: torch.Tensor, experts: Sequence[Any], rows: Sequence[int], y: torch.Tensor) -> None:
        """See TokenKernel."""
        counts = {f"at_{level}": count for level, count in Counter(level for _, level in experts).items()}
        with self._timeline.span(COMPUTE, "experts", rows=x.shape[0], **counts):
            self._of_token.into(x, [expert for expert, _ in experts], rows, y)


def timed_kernel(kernel: ExpertKernel, timeline: Timeline) -> ExpertKernel:
    """A kernel whose calls are spans, of the same protocol."""
    if isinstance(kernel, TokenKernel):
        return TimedTokenKernel(kernel, timeline)
    return TimedKernel(kernel, timeline)


class TimedLeases(Leases):
    """Other leases; the time until the next one is there is a span on the wait lane, unless it was there already."""

    def __init__(self, leases: Leases, timeline: Timeline, name: str) -> None:
        self._leases, self._timeline, self._name = leases, timeline, name

    def __next__(self) -> Lease:
        """See Leases."""
        start = self._timeline.clock()
        try:
            return next(self._leases)
        finally:
            if self._timeline.clock() - start > NO_WAIT:
                self._timeline.add(WAIT, self._name, start)

    def ready(self) -> list[Lease]:
        """See Leases."""
        return self._leases.ready()


class TimedSource(ExpertSource):
    """Another source, whose leases are timed. What the engine's thread does between two streams is dense work.

    It holds nothing, so that every layer's experts are a stream and seen.

    `begin` and `end` frame a step: they say where the first and the last dense span of it are.
    """

    def __init__(self, source: ExpertSource, timeline: Timeline) -> None:
        self._source, self._timeline = source, timeline
        self._since = timeline.clock()

    def begin(self) -> None:
        """A step begins."""
        self._since = self._timeline.clock()

    def end(self) -> None:
        """It ends: since the last stream it was the rest of a layer, and the head."""
        self._timeline.add(COMPUTE, "dense", self._since)

    @contextmanager
    def stream(self, wanted: Mapping[ExpertKey, int], *, passing: bool = False) -> Iterator[Leases]:
        """See ExpertSource."""
        self.end()
        layers = {key.layer for key in wanted}
        name = f"for layer {', '.join(map(str, sorted(layers)))}"
        try:
            with self._source.stream(wanted, passing=passing) as leases:
                yield TimedLeases(leases, self._timeline, name)
        finally:
            self.begin()

    @property
    def looks_ahead(self) -> bool:
        """See ExpertSource."""
        return self._source.looks_ahead

    def speculate(self, predicted: Mapping[ExpertKey, int]) -> None:
        """See ExpertSource."""
        self._source.speculate(predicted)

    def hold(self, key: ExpertKey, level: int) -> Lease | None:
        """See ExpertSource."""
        return None

    @property
    def roomy(self) -> bool:
        """See ExpertSource."""
        return False

    def count_held(self, levels: Sequence[int]) -> None:
        """See ExpertSource."""
        self._source.count_held(levels)

    @property
    def holds(self) -> int:
        """See ExpertSource."""
        return self._source.holds

    def settle(self) -> None:
        """See ExpertSource."""
        self._source.settle()

    def take_counts(self) -> TransferCounts:
        """See ExpertSource."""
        return self._source.take_counts()

    def close(self) -> None:
        """See ExpertSource."""
        self._source.close()
