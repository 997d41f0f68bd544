"""tools/timing/lanes.py on traces whose sums are known, and on one of the benchmark's timeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgemoe.bench.timeline import COMPUTE, SSD, WAIT, Timeline
from tools.timing import lanes


def trace_of(*spans: tuple[str, str, int, int], group: str = "exact 4") -> dict[str, object]:
    """A trace of spans (lane, name, start and end in milliseconds)."""
    now = [0]
    timeline = Timeline(clock=lambda: now[0], group=group)
    for lane, name, start, end in spans:
        now[0] = end * 10**6
        timeline.add(lane, name, start * 10**6)
    return timeline.as_json()


SPANS = [
    (COMPUTE, "prefill step", 0, 50),
    (SSD, "layer 0 expert 1", 0, 50),
    (COMPUTE, "decode step", 50, 100),
    (COMPUTE, "dense", 50, 70),
    (SSD, "layer 0 expert 2", 60, 85),
    (SSD, "layer 0 expert 3", 65, 80),
    (WAIT, "layer 0", 70, 90),
    (COMPUTE, "experts", 90, 98),
    (COMPUTE, "decode step", 110, 120),
    (COMPUTE, "dense", 110, 120),
]


def test_the_parts_of_a_step() -> None:
    """Reads that overlap count once; waits are divided by whether a read is under way; prompts do not count."""
    (row,) = lanes.lanes_of(trace_of(*SPANS))
    assert (row.row, row.steps) == ("exact 4", 2)
    assert (row.step, row.experts, row.dense, row.wait, row.rest) == (30, 4, 15, 10, 1)
    assert (row.wait_reading, row.wait_idle, row.reading, row.hidden) == (7.5, 2.5, 12.5, 5)


def test_the_command_prints_a_row_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a table, and as JSON."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace_of(*SPANS, group="8/4/2/0 r 0.9: a")))
    assert lanes.main([str(path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["row"], row["wait"]) == ("8/4/2/0 r 0.9: a", 10)
    assert lanes.main([str(path)]) == 0
    assert "| 8/4/2/0 r 0.9: a | 2 | 30.0 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "says"), [("[", "a trace of edgemoe bench"), ('{"traceEvents": []}', "steps of new")]
)
def test_what_is_no_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, says: str
) -> None:
    """With exit code 2, and what to do."""
    path = tmp_path / "trace.json"
    path.write_text(content)
    assert lanes.main([str(path)]) == 2
    assert says in capsys.readouterr().err
