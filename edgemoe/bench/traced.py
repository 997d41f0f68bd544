"""One run of each row with a timeline, apart from the measured runs, because recording takes time; and its sums."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Generator, Iterable
from functools import partial

from edgemoe.bench.run import BenchRequest, Notify, make_plans
from edgemoe.bench.sample import take_sample
from edgemoe.bench.timed_source import TimedSource
from edgemoe.bench.timeline import COMPUTE, SSD, WAIT, TimedForm, TimedKernel, Timeline
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.engine.parts import Wraps
from edgemoe.experts.step import StepContext
from edgemoe.memory.plan import MemoryPlan
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch.base import ExpertSource

DECODE = "decode step"
"""The name of the span of a step of new tokens."""

Intervals = list[tuple[int, int]]
"""Ascending and disjoint, nanoseconds."""


class TimedEngine(Engine):
    """An engine whose steps, dense work, experts, waits, reads and copies are spans of a timeline.

    Evictions from VRAM to DRAM bypass the wrapped interfaces, so the copy lane lacks them.
    """

    def __init__(
        self, store: StoreModel, plan: MemoryPlan, settings: RunSettings, timeline: Timeline
    ) -> None:
        timed = dataclasses.replace(store, form=TimedForm(store.form, timeline))
        self._timeline = timeline
        super().__init__(
            timed,
            plan,
            settings,
            Wraps(partial(TimedKernel, timeline=timeline), self._wrap_source),
        )

    def _wrap_source(self, source: ExpertSource) -> ExpertSource:
        self._timed_source = TimedSource(source, self._timeline)
        return self._timed_source

    def run(self, context: StepContext) -> Generator[int, None, None]:
        """Runs a step within a span (Engine.run)."""
        name = DECODE if context.step.decodes else "prefill step"
        with self._timeline.span(COMPUTE, name, rows=context.step.rows):
            self._timed_source.dense_begins()
            try:
                yield from super().run(context)
            finally:
                self._timed_source.dense_ends()


def trace_rows(store: StoreModel, request: BenchRequest, notify: Notify) -> Timeline:
    """Runs the first prompt of the first set on each row, from an empty expert cache, and records the spans.

    Args:
        store: the store of the model.
        request: see run_bench; `runs` is not used.
        notify: called with the name of the next row.

    Returns:
        The timeline of all rows.

    Raises:
        UserError, DoesNotFit, DamagedData: as run_bench.
    """
    timeline = Timeline()
    plans = make_plans(store, request)
    (encode,) = request.prompt_sets(store, 1)[0].prompts
    for row, plan in zip(request.rows, plans, strict=True):
        notify(f"timeline: {row.name}")
        timeline.group = row.name
        with TimedEngine(store, plan, row.settings, timeline) as engine:
            take_sample(engine, engine.sequences.new(), encode, request.new_tokens)
        del engine
        gc.collect()
    return timeline


@dataclasses.dataclass(frozen=True)
class Lanes:
    """The parts of a row's steps of new tokens: mean times of a step, in milliseconds.

    Args:
        row: the row of the benchmark.
        step: the whole.
        experts, dense, wait: products of experts, dense work, and waits for experts.
        wait_reading: the part of the waits in which a read is under way; the others wait for a thread or a copy.
        reading: time in which at least one read is under way.
    """

    row: str
    step: float
    experts: float
    dense: float
    wait: float
    wait_reading: float
    reading: float

    def __str__(self) -> str:
        """The times as a sentence."""
        rest = self.step - self.experts - self.dense - self.wait
        return (
            f"{self.row}: {self.step:.1f} ms a new token with a timeline: experts {self.experts:.1f}, dense work "
            f"{self.dense:.1f}, waits {self.wait:.1f} ({self.wait_reading:.1f} of them while the disk reads), the rest "
            f"{rest:.1f}; the disk reads for {self.reading:.1f}, {self.reading - self.wait_reading:.1f} of them hidden"
        )


def lanes_of(timeline: Timeline) -> list[Lanes]:
    """Sums up the rows that have steps of new tokens, in their order."""
    rows: dict[str, dict[str, Intervals]] = {}
    for span in timeline.spans:
        kind = span.name if span.lane == COMPUTE else span.lane
        rows.setdefault(span.group, {}).setdefault(kind, []).append((span.start, span.end))
    return [_lanes(row, spans) for row, spans in rows.items() if DECODE in spans]


def _lanes(row: str, spans: dict[str, Intervals]) -> Lanes:
    steps = union(spans[DECODE])
    inside = {kind: common(union(of_kind), steps) for kind, of_kind in spans.items()}

    def mean(intervals: Intervals) -> float:
        return sum(end - start for start, end in intervals) / len(spans[DECODE]) / 1e6

    experts, dense, wait, reading = (inside.get(kind, []) for kind in ("experts", "dense", WAIT, SSD))
    return Lanes(
        row, mean(steps), mean(experts), mean(dense), mean(wait), mean(common(wait, reading)), mean(reading)
    )


def union(spans: Iterable[tuple[int, int]]) -> Intervals:
    """Joins intervals that meet.

    >>> union([(3, 5), (1, 2), (4, 7)])
    [(1, 2), (3, 7)]
    """
    joined: Intervals = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def common(one: Intervals, other: Intervals) -> Intervals:
    """The intersection of two unions of intervals.

    >>> common([(0, 4), (6, 9)], [(3, 7)])
    [(3, 4), (6, 7)]
    """
    shared, i, j = Intervals(), 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            shared.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return shared
