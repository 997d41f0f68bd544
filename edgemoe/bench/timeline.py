"""A timeline of reads, copies and computation as spans, in Chrome's trace format.

The viewers `chrome://tracing` and https://ui.perfetto.dev open the file. A process of the trace is a lane, and its
threads are threads of this program:

- SSD: reads, one lane for all readers.
- copy: the readers' work on bytes in memory.
- compute: steps, and within them the dense work (attention, norms, routers, the head) and calls of the expert kernel.
- wait: times when the engine's thread waits for experts.

While SSD and compute are busy at once, a read is hidden; wait shows the rest.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from edgemoe.cache.base import Observer
from edgemoe.kernels.activation import Activation
from edgemoe.kernels.base import ExpertKernel, Part, Rows
from edgemoe.machine.device import Event
from edgemoe.prefetch.base import PinnedExperts
from edgemoe.prefetch.launched import LaunchedWork
from edgemoe.storage.base import Blocks, ExpertKey, Plane, PlaneReader, ResidentForm, Source

LANES = ("compute", "wait", "copy", "SSD")
COMPUTE, WAIT, COPY, SSD = LANES

NO_WAIT = 20_000
"""Nanoseconds that handing out a ready list takes: a shorter wait makes no span."""


@dataclass(frozen=True)
class Span:
    """A thread's work from `start` to `end`, in nanoseconds of the timeline's clock."""

    group: str
    lane: str
    thread: str
    name: str
    start: int
    end: int
    details: dict[str, int]


@dataclass
class Timeline:
    """Collects spans of all threads.

    Args:
        clock: returns nanoseconds.
        group: prefix of the lanes of later spans, such as the name of a benchmark's row.
        spans: the spans in the order of their ends.
    """

    clock: Callable[[], int] = time.perf_counter_ns
    group: str = ""
    spans: list[Span] = field(default_factory=list)

    def add(self, lane: str, name: str, start: int, **details: int) -> None:
        """Adds a span of the calling thread to a lane, from `start` (nanoseconds of the clock) until now."""
        thread = threading.current_thread().name
        self.spans.append(Span(self.group, lane, thread, name, start, self.clock(), details))

    @contextmanager
    def span(self, lane: str, name: str, **details: int) -> Iterator[None]:
        """Adds a span of the context's duration to a lane, also where the context ends in an error."""
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
    """Wraps a reader: its reads are spans on the SSD lane, the times between its reads spans on the copy lane.

    It serves one transfer in the transfer's thread. Before, between and after its reads the transfer copies from other
    tiers and merges planes. `finish` ends the last copy span.
    """

    def __init__(self, reader: PlaneReader, timeline: Timeline, name: str) -> None:
        self._reader, self._timeline, self._name = reader, timeline, name
        self._since = timeline.clock()

    def read(self, key: ExpertKey, first: Plane, last: Plane, into: Sequence[memoryview]) -> int:
        """Ends the span on the copy lane, and reads within a span on the SSD lane (PlaneReader.read)."""
        self.finish()
        planes = "+".join(Plane(i).label for i in range(first, last + 1))
        with self._timeline.span(SSD, f"{self._name} {planes}", bytes=sum(map(len, into))):
            read = self._reader.read(key, first, last, into)
        self._since = self._timeline.clock()
        return read

    def finish(self) -> None:
        """Adds the time since the last read to the copy lane."""
        self._timeline.add(COPY, self._name, self._since)


class TimedForm(ResidentForm):
    """Wraps the form of a StoreModel: its fills are spans."""

    def __init__(self, form: ResidentForm, timeline: Timeline) -> None:
        self._form, self._timeline = form, timeline
        self.kinds = form.kinds

    def rewritten(self, resident: int, level: int) -> tuple[str, ...]:
        """Returns the kinds that the wrapped form replaces on promotion."""
        return self._form.rewritten(resident, level)

    def level_in(self, layer: int, level: int) -> int:
        """The level of the wrapped form."""
        return self._form.level_in(layer, level)

    def builds_on(self, resident: int, level: int) -> bool:
        """Whether the wrapped form makes use of resident blocks."""
        return self._form.builds_on(resident, level)

    def fill(
        self, reader: PlaneReader, key: ExpertKey, level: int, into: Blocks, source: Source | None
    ) -> int:
        """Fills blocks with a timed reader (ResidentForm.fill)."""
        timed = TimedReader(reader, self._timeline, f"layer {key.layer} expert {key.expert}")
        read = self._form.fill(timed, key, level, into, source)
        timed.finish()
        return read


class TimedKernel:
    """Wraps a kernel: its calls are spans on the compute lane.

    Attributes:
        wrapped: the kernel.
    """

    def __init__(self, kernel: ExpertKernel, timeline: Timeline) -> None:
        self.wrapped, self._timeline = kernel, timeline

    def forward(self, x: Rows, parts: Sequence[Part], activation: Activation, out: torch.Tensor) -> None:
        """Runs the kernel within a span."""
        levels = Counter(part.level for part in parts)
        counts = {f"at_{level}": count for level, count in levels.items()}
        with self._timeline.span(COMPUTE, "experts", rows=len(out), **counts):
            self.wrapped.forward(x, parts, activation, out)


class NothingPinned(PinnedExperts):
    """Pins no expert, so every layer sends a request that the timeline records."""

    def __init__(self) -> None:
        self.launched = LaunchedWork()

    def observe(self, observer: Observer) -> None:
        """Never calls `observer`."""

    def observe_slower(self, observer: Observer) -> None:
        """Never calls `observer`."""

    def arriving(self, keys: Iterable[ExpertKey]) -> list[Event]:
        """No events: no expert is pinned."""
        return []

    def mark_used(self, keys: Sequence[ExpertKey]) -> None:
        """Marks nothing: without pins no layer runs without a request."""
