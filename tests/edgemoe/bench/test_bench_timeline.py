"""The timeline: spans of work by lane and thread, in a format that viewers read."""

from __future__ import annotations

import itertools
import json
import threading

import pytest

from edgemoe.bench.rows import BenchRow
from edgemoe.bench.run import BenchRequest
from edgemoe.bench.timed_source import TimedRequest
from edgemoe.bench.timeline import (
    COMPUTE,
    COPY,
    LANES,
    NO_WAIT,
    SSD,
    WAIT,
    TimedForm,
    TimedKernel,
    Timeline,
)
from edgemoe.bench.traced import DECODE, lanes_of, trace_rows
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import ReadFailed
from edgemoe.kernels.activation import CUSTOM, Activation
from edgemoe.policy.settings import RunSettings
from edgemoe.prefetch.base import Request
from edgemoe.storage.base import ExpertKey, Plane, PlaneReader, ResidentForm
from edgemoe.storage.store.reader import RecordReader

KEY = ExpertKey(3, 5)
EXPERT_BYTES = {4: 12288, 8: 20480}


def ticking() -> Timeline:
    """A timeline whose clock advances by 1,000 ns at every reading."""
    return Timeline(clock=itertools.count(0, 1000).__next__)


def complete(trace) -> list[dict]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def names_of(trace, kind: str) -> dict[tuple[int, int], str]:
    """(process, thread) -> the name that the trace gives it."""
    return {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M" and e["name"] == kind
    }


def test_spans_become_complete_events():
    """Microseconds since the first span's start, a process for each lane in a fixed order, a thread by name."""
    timeline = ticking()
    with timeline.span(SSD, "read", bytes=7), timeline.span(COMPUTE, "expert"):
        pass
    trace = timeline.as_json()
    assert [(e["name"], e["ts"], e["dur"], e["args"]) for e in complete(trace)] == [
        ("expert", 1, 1, {}),
        ("read", 0, 3, {"bytes": 7}),
    ]
    assert list(names_of(trace, "process_name").values()) == [COMPUTE, SSD]
    assert set(names_of(trace, "thread_name").values()) == {threading.current_thread().name}
    assert {e["cat"]: e["pid"] for e in complete(trace)} == {COMPUTE: 1, SSD: 2}


def test_a_span_ends_with_an_error():
    """A span ends at the error that its work raises."""
    timeline = ticking()
    with pytest.raises(ValueError, match="x"), timeline.span(SSD, "read"):
        raise ValueError("x")
    assert [(span.start, span.end) for span in timeline.spans] == [(0, 1000)]


class TwoReads(ResidentForm):
    """Reads base, does something, reads d8."""

    kinds = ()

    def rewritten(self, held, level):
        return ("p4",) if held < level else ()

    def fill(self, reader, key, level, into, source):
        return reader.read(key, Plane.BASE, Plane.D4, [memoryview(bytes(6))]) + reader.read(
            key, Plane.D8, Plane.D8, [memoryview(bytes(4))]
        )


class Reader(PlaneReader):
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def read(self, key, first, last, into):
        if self.error:
            raise self.error
        return sum(map(len, into))


def test_a_fill_is_reads_with_copies_between():
    """Reads are on the SSD lane with their bytes; the time before, between and after them is on the copy lane."""
    timeline = ticking()
    form = TimedForm(TwoReads(), timeline)
    assert form.rewritten(0, 4) == ("p4",)
    assert form.fill(Reader(), KEY, 8, {}, None) == 10
    name = "layer 3 expert 5"
    assert [(s.lane, s.name, s.details) for s in timeline.spans] == [
        (COPY, name, {}),
        (SSD, f"{name} base+d4", {"bytes": 6}),
        (COPY, name, {}),
        (SSD, f"{name} d8", {"bytes": 4}),
        (COPY, name, {}),
    ]
    assert all(a.end <= b.start for a, b in itertools.pairwise(timeline.spans))


def test_an_error_passes_through():
    """A read that fails fails as it would without a timeline."""
    error = ReadFailed("a", "b", "c")
    with pytest.raises(ReadFailed) as raised:
        TimedForm(TwoReads(), ticking()).fill(Reader(error), KEY, 8, {}, None)
    assert raised.value is error


def test_a_benchmark_is_traced_row_by_row(tiny_store, tmp_path):
    """Each row has its lanes, every experts span lies within a step, and every read is a whole expert."""
    rows = (BenchRow("low", RunSettings.uniform(4)), BenchRow("high", RunSettings.uniform(8)))
    request = BenchRequest(rows, prompt_tokens=5, new_tokens=4, runs=1)
    notes: list[str] = []
    path = tmp_path / "trace.json"
    trace_rows(StoreModel.open(tiny_store), request, notes.append).write(path)
    trace = json.loads(path.read_text())
    lanes = [f"{row}: {lane}" for row in ("low", "high") for lane in LANES]
    processes = {pid: name for (pid, _), name in names_of(trace, "process_name").items()}
    assert list(processes.values()) == lanes
    assert notes == ["timeline: low", "timeline: high"]
    events: dict[str, list[dict]] = {name: [] for name in lanes}
    for event in complete(trace):
        events[processes[event["pid"]]].append(event)
    for row, level in (("low", 4), ("high", 8)):
        steps = [e for e in events[f"{row}: {COMPUTE}"] if e["name"].endswith("step")]
        experts = [e for e in events[f"{row}: {COMPUTE}"] if e["name"] == "experts"]
        assert [e["name"] for e in steps] == ["prefill step"] + ["decode step"] * 3
        assert sum(expert["args"][f"at_{level}"] for expert in experts) >= 3 * 4
        for expert in experts:
            inside = [s for s in steps if s["ts"] <= expert["ts"] and end(expert) <= end(s)]
            assert len(inside) == 1
        dense = [e for e in events[f"{row}: {COMPUTE}"] if e["name"] == "dense"]
        # The model has two layers with experts, so three stretches without them in each of four steps.
        assert len(dense) == 4 * 3
        waits = events[f"{row}: {WAIT}"]
        assert {e["name"] for e in waits} <= {"for layer 0", "for layer 2"}
        assert waits, "the first requests find no expert resident"
        one_thread = sorted([*dense, *experts, *waits], key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.002 for a, b in itertools.pairwise(one_thread))
        reads = events[f"{row}: {SSD}"]
        assert reads
        assert {e["args"]["bytes"] for e in reads} == {EXPERT_BYTES[level]}
        threads = {e["tid"] for e in reads}
        assert threads.isdisjoint({e["tid"] for e in steps})
        assert {e["tid"] for e in events[f"{row}: {COPY}"]} == threads


class Late(Request):
    """Gives one list after so many nanoseconds of a clock."""

    def __init__(self, clock: list[int], after: int) -> None:
        self._clock, self._after = clock, after

    def __next__(self):
        self._clock[0] += self._after
        return ["lease"]


@pytest.mark.parametrize(("after", "spans"), [(NO_WAIT, 0), (NO_WAIT + 1, 1)])
def test_only_waiting_is_a_wait(after, spans):
    """A ready list makes no span; a list that was waited for has a span as long as the wait."""
    clock = [0]
    timeline = Timeline(clock=lambda: clock[0])
    assert next(TimedRequest(Late(clock, after), timeline, "for layer 3")) == ["lease"]
    assert [(s.lane, s.name, s.end - s.start) for s in timeline.spans] == [
        (WAIT, "for layer 3", after)
    ] * spans


def test_overlap_is_seen(tiny_store, tmp_path, monkeypatch):
    """A read during a computation has a span next to it; in this test neither ends before the other began."""
    reading, computing = threading.Event(), threading.Event()
    reads = itertools.count()
    read, compute = RecordReader.read, TimedKernel.forward

    def held_read(self, *given):
        if next(reads):
            reading.set()
            assert computing.wait(30)
        return read(self, *given)

    def held_compute(self, x, parts, activation, out):
        def inside(y):
            computing.set()
            assert reading.wait(30)
            return activation.apply(y)

        compute(self, x, parts, Activation(CUSTOM, inside), out)

    monkeypatch.setattr(RecordReader, "read", held_read)
    monkeypatch.setattr(TimedKernel, "forward", held_compute)
    rows = (BenchRow("", RunSettings.uniform(4)),)
    path = tmp_path / "trace.json"
    trace_rows(StoreModel.open(tiny_store), BenchRequest(rows, prompt_tokens=5, new_tokens=2), print).write(
        path
    )
    events = complete(json.loads(path.read_text()))
    experts = next(e for e in events if e["name"] == "experts")
    early = [e for e in events if e["cat"] == SSD and e["ts"] < experts["ts"] + experts["dur"]]
    assert any(end(read) > experts["ts"] + 0.002 for read in early)


def end(event) -> float:
    return event["ts"] + event["dur"] + 0.002


def test_the_sums_of_a_timeline():
    """Reads that overlap count once, waits are divided by whether a read is under way, and prompts do not count."""
    now = [0]
    timeline = Timeline(clock=lambda: now[0], group="exact 4")
    for lane, name, start, end in (
        (COMPUTE, "prefill step", 0, 50),
        (SSD, "layer 0 expert 1", 0, 50),
        (COMPUTE, DECODE, 50, 100),
        (COMPUTE, "dense", 50, 70),
        (SSD, "layer 0 expert 2", 60, 85),
        (SSD, "layer 0 expert 3", 65, 80),
        (WAIT, "layer 0", 70, 90),
        (COMPUTE, "experts", 90, 98),
        (COMPUTE, DECODE, 110, 120),
        (COMPUTE, "dense", 110, 120),
    ):
        now[0] = end * 10**6
        timeline.add(lane, name, start * 10**6)
    (row,) = lanes_of(timeline)
    assert (row.row, row.step, row.experts, row.dense) == ("exact 4", 30, 4, 15)
    assert (row.wait, row.wait_reading, row.reading) == (10, 7.5, 12.5)
    assert "30.0 ms a new token" in str(row)
    assert "waits 10.0 (7.5 of them while the disk reads), the rest 1.0; the disk reads for 12.5, 5.0" in str(
        row
    )
