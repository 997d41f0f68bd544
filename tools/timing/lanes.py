"""Sums a trace of `edgemoe bench --trace` up: what steps of new tokens spend time on, and what waits for what.

    edgemoe bench --model W1 --vram-limit 2.5GB --exact 4 --runs 1 --trace trace.json
    python -m tools.timing.lanes trace.json [--json]

Of each row of the benchmark, milliseconds a step. A step is experts' products, dense work, waits for experts, and the
rest, which is Python between them; while a trace is written every expert is requested, and none is pinned. Waits are
divided by what the disk does: a read is under way, or none is; `hidden` are times when a read is under way while the
step does not wait.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgemoe.bench.timeline import COMPUTE, SSD, WAIT
from storage.errors import UserError
from tools.command_line import failed, make_parser

Intervals = list[tuple[float, float]]
"""Ascending, disjoint, in microseconds."""


@dataclass(frozen=True)
class Lanes:
    """Mean milliseconds of a row's steps of new tokens. Field names are the JSON's.

    Args:
        row: of the benchmark.
        steps: how many.
        step, experts, dense, wait, rest: of a step.
        wait_reading, wait_idle: `wait`, while a read is under way and while none is.
        reading: at least one read is under way.
        hidden: `reading` less `wait_reading`.
    """

    row: str
    steps: int
    step: float
    experts: float
    dense: float
    wait: float
    rest: float
    wait_reading: float
    wait_idle: float
    reading: float
    hidden: float


def union(spans: Iterable[tuple[float, float]]) -> Intervals:
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
    """What two unions share.

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


def length(intervals: Intervals) -> float:
    """The sum of their lengths."""
    return sum(end - start for start, end in intervals)


def lanes_of(trace: dict[str, Any]) -> list[Lanes]:
    """Sums up the rows of a trace that have steps of new tokens, in their order."""
    names = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    spans: dict[str, dict[str, Intervals]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            row = names[event["pid"]].rpartition(": ")[0]
            of_row = spans.setdefault(row, {})
            lane = event["name"] if event["cat"] == COMPUTE else event["cat"]
            of_row.setdefault(lane, []).append((event["ts"], event["ts"] + event["dur"]))
    return [_lanes(row, of_row) for row, of_row in spans.items() if "decode step" in of_row]


def _lanes(row: str, spans: dict[str, Intervals]) -> Lanes:
    steps = union(spans["decode step"])
    inside = {name: common(union(of_name), steps) for name, of_name in spans.items()}
    wait, reading, experts, dense = (inside.get(name, []) for name in (WAIT, SSD, "experts", "dense"))
    count = len(spans["decode step"])

    def mean(microseconds: float) -> float:
        return microseconds / count / 1000

    waiting, both = length(wait), length(common(wait, reading))
    return Lanes(
        row=row,
        steps=count,
        step=mean(length(steps)),
        experts=mean(length(experts)),
        dense=mean(length(dense)),
        wait=mean(waiting),
        rest=mean(length(steps) - length(union([*experts, *dense, *wait]))),
        wait_reading=mean(both),
        wait_idle=mean(waiting - both),
        reading=mean(length(reading)),
        hidden=mean(length(reading) - both),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.timing.lanes", __doc__)
    parser.add_argument("trace", type=Path, help="file of `edgemoe bench --trace`")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    try:
        try:
            found = lanes_of(json.loads(options.trace.read_text("utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"a trace of edgemoe bench in {options.trace}", str(error), "write one with --trace"
            ) from error
        if not found:
            raise UserError(
                "steps of new tokens in the trace", "none", "give the benchmark --new-tokens 2 or more"
            )
    except UserError as error:
        return failed("tools.timing.lanes", error)
    rows = [asdict(each) for each in found]
    if options.json:
        print(json.dumps(rows))
        return 0
    print("| " + " | ".join(rows[0]) + " |\n" + "|---" * len(rows[0]) + "|")
    for row in rows:
        print(
            "| "
            + " | ".join(f"{value:.1f}" if isinstance(value, float) else str(value) for value in row.values())
            + " |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
