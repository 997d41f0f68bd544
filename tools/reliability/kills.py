"""Kills jobs that write files with SIGKILL at random moments, and compares what the next run makes of their files.

    python -m tools.reliability.kills [--job NAME] [--model DIR] [--kills 1000] [--work DIR]

Jobs: convert, first-use, compensate, calibrate, recode, prefix-cache (the writing of a prompt's KV), save (/save in a
chat). Every run is a process of its own. The k-th kill comes at a random moment of the k-th part of the time that a
whole run takes. What it leaves must be usable; the job then runs to its end, and all files must have the bytes of an
uninterrupted run. Exit code 0: both held after every kill; 1: not after each.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from edgemoe.errors import EdgemoeError, UserError
from edgemoe.models.demo import DEMO
from tools.command_line import failed, make_parser, positive
from tools.reliability.killed_jobs import (
    Compensation,
    Conversion,
    Job,
    contents,
    end,
    start,
    whole,
)

JOBS = "convert", "first-use", "compensate", "calibrate", "recode", "prefix-cache", "save"

TIMED = 5
"""Whole runs, whose median time is the span of the kills."""

_MOST_RUNS = 20
"""Runs for each kill, at most: some end before their kill."""


def run(job: Job, work: Path, kills: int, seed: int) -> dict[str, object]:
    """Kills runs of a job, and returns counts.

    Args:
        job: the job whose runs are killed.
        work: an empty directory for stores.
        kills: number of kills.
        seed: the seed of the moments.

    Returns:
        killed; states, the different sets of files that kills left; finished, runs that ended before their kill;
        unsound, the numbers of kills that left something unusable; wrong, of those after which bytes differ; seconds of
        a whole run, and of everything.
    """
    begin, random, span = time.monotonic(), Random(seed), _median_time(job, work)
    straight, store = contents(work / "0"), work / "store"
    killed, finished, states, unsound, wrong = 0, 0, set(), list[int](), list[int]()
    for _ in range(_MOST_RUNS * kills):
        if killed == kills:
            break
        if not _killed(job, store, (killed + random.random()) / kills * span):
            finished += 1
            span *= 0.95  # a process ends some time after its last write
            continue
        killed += 1
        states.add(frozenset(contents(store).items()))
        if not _sound(job, store):
            unsound.append(killed)
        whole(job, store)
        if contents(store) != straight:
            wrong.append(killed)
        _show_progress(killed, kills, len(wrong), time.monotonic() - begin)
    counts = {
        "killed": killed,
        "states": len(states),
        "finished": finished,
        "unsound": unsound,
        "wrong": wrong,
    }
    return counts | {"run_s": round(span, 3), "seconds": round(time.monotonic() - begin, 1)}


def _killed(job: Job, directory: Path, seconds: float) -> bool:
    """Runs a job in a directory of its own and kills it after so many seconds; False: it ended before."""
    _prepare(job, directory)
    child = start(job, directory)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return end(child) == -signal.SIGKILL


def _job(name: str, source: Path, plain: Path) -> Job:
    """Makes a job of a checkpoint and its store; imports what runs it."""
    if name == "convert":
        return Conversion(source)
    if name == "compensate":
        return Compensation(source, plain)
    from tools.reliability import killed_programs as programs

    if name == "first-use":
        return programs.FirstUse(source)
    if name == "calibrate":
        return programs.Calibrating(source, plain)
    if name == "recode":
        return programs.Recoding(source, plain)
    return programs.PrefixCaching(plain) if name == "prefix-cache" else programs.Saving(plain)


def _prepare(job: Job, directory: Path) -> None:
    """Makes a directory that a run begins from."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    job.prepare(directory)


def _sound(job: Job, directory: Path) -> bool:
    """Whether what a killed run has left can be used."""
    try:
        return job.sound(directory)
    except EdgemoeError:
        return False


def _median_time(job: Job, work: Path) -> float:
    """Runs a job TIMED times, in the folders 0, 1, ... of `work`; returns the median of the seconds."""
    for i in range(TIMED):
        _prepare(job, work / str(i))
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
    parser.add_argument("--job", choices=JOBS, default="convert", help="what is killed")
    given = parser.parse_args(argv)
    with TemporaryDirectory(dir=given.work) as work, suppress(KeyboardInterrupt):
        try:
            job = _job(given.job, given.model, Path(work) / "plain")
            if given.job not in ("convert", "first-use"):
                whole(Conversion(given.model), Path(work) / "plain")
            counts = run(job, Path(work), given.kills, given.seed)
        except UserError as error:
            return failed("tools.reliability.kills", error)
        print(json.dumps(counts))
        return 1 if counts["unsound"] or counts["wrong"] or counts["killed"] != given.kills else 0
    return 130


if __name__ == "__main__":
    sys.exit(main())
