"""Kills conversions with SIGKILL at random moments, and compares what the next one makes of their files.

    python -m tools.reliability.kills [--model DIR] [--kills 1000] [--work DIR] [--compensate RANK]

Every conversion is a process of its own. The k-th kill comes at a random moment of the k-th part of the time that a
whole conversion takes; a conversion of the same store then runs to its end, and all files must have the bytes of an
uninterrupted one. With --compensate, runs that compensate the model's store are killed instead. Exit code 0: all files
had these bytes after every kill; 1: not after each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from edgemoe.errors import UserError
from edgemoe.models.demo import DEMO
from tools.command_line import failed, make_parser, positive
from tools.reliability.killed_jobs import Job, contents, convert_quietly, end, start, whole

TIMED = 5
"""Whole conversions, whose median time is the span of the kills."""

_MOST_RUNS = 20
"""Conversions a kill, at most: some end before their kill."""


def run(job: Job, work: Path, kills: int, seed: int) -> dict[str, object]:
    """Kills runs of a job, and returns counts.

    Args:
        job: what is killed.
        work: an empty directory for stores.
        kills: how many.
        seed: the seed of the moments.

    Returns:
        killed; states, the different sets of files that kills left; finished, conversions that ended before their kill;
        wrong, the numbers of kills after which bytes differ; seconds of a whole conversion, and of everything.
    """
    begin, random = time.monotonic(), Random(seed)
    span = _median_time(job, work)
    straight, store = contents(work / "0"), work / "store"
    killed, finished, states, wrong = 0, 0, set(), list[int]()
    for _ in range(_MOST_RUNS * kills):
        if killed == kills:
            break
        job.prepare(store)
        child = start(job, store)
        time.sleep((killed + random.random()) / kills * span)
        os.kill(child, signal.SIGKILL)
        if end(child) != -signal.SIGKILL:
            finished += 1
            span *= 0.99  # it takes less time by now than when it was timed
            continue
        killed += 1
        states.add(frozenset(contents(store).items()) if store.exists() else frozenset())
        whole(job, store)
        if contents(store) != straight:
            wrong.append(killed)
        _show_progress(killed, kills, len(wrong), time.monotonic() - begin)
    counts = {"killed": killed, "states": len(states), "finished": finished, "wrong": wrong}
    return counts | {"conversion_s": round(span, 3), "seconds": round(time.monotonic() - begin, 1)}


def _median_time(job: Job, work: Path) -> float:
    """Runs a job TIMED times, in the folders 0, 1, ... of `work`; returns the median of the seconds."""
    for i in range(TIMED):
        job.prepare(work / str(i))
    return sorted(whole(job, work / str(i)) for i in range(TIMED))[TIMED // 2]


def _show_progress(killed: int, kills: int, wrong: int, seconds: float) -> None:
    if sys.stderr.isatty():
        left = seconds / killed * (kills - killed)
        print(f"\r{killed} of {kills} kills, {wrong} wrong, {left:.0f} s left ", end="", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the kills and prints the counts as JSON."""
    parser = make_parser("tools.reliability.kills", __doc__)
    parser.add_argument("--model", type=Path, default=DEMO, help="a checkpoint; default: the demo model")
    parser.add_argument("--kills", type=positive, default=1000)
    parser.add_argument("--work", type=Path, help="directory for the stores; default: a temporary one")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument(
        "--compensate", type=positive, metavar="RANK", help="kill `edgemoe compensate` instead"
    )
    given = parser.parse_args(argv)
    with TemporaryDirectory(dir=given.work) as work, suppress(KeyboardInterrupt):
        try:
            job = Job(given.model, given.compensate, Path(work) / "plain")
            if job.rank:
                convert_quietly(job.source, job.plain)
            counts = run(job, Path(work), given.kills, given.seed)
        except UserError as error:
            return failed("tools.reliability.kills", error)
        print(json.dumps(counts))
        return 1 if counts["wrong"] or counts["killed"] != given.kills else 0
    return 130


if __name__ == "__main__":
    sys.exit(main())
