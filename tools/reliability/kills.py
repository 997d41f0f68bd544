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
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import xxhash

from edgemoe.errors import UserError
from edgemoe.families.table import family_of
from edgemoe.kernels.registry import compute
from edgemoe.models.demo import DEMO
from edgemoe.storage.compensators.making import compensate
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.run import convert
from tools.command_line import failed, make_parser, positive

TIMED = 5
"""Whole conversions, whose median time is the span of the kills."""

_MOST_RUNS = 20
"""Conversions a kill, at most: some end before their kill."""


def contents(store: Path) -> dict[str, int]:
    """Path -> hash of every file in a directory and its folders."""
    files = sorted(path for path in store.rglob("*") if path.is_file())
    return {str(path.relative_to(store)): xxhash.xxh3_64_intdigest(path.read_bytes()) for path in files}


@dataclass(frozen=True)
class Job:
    """What is killed.

    Args:
        source: a checkpoint.
        rank: of the compensators that are computed; None: the checkpoint is converted.
        plain: a store without compensators, which each run begins from.
    """

    source: Path
    rank: int | None
    plain: Path

    def prepare(self, store: Path) -> None:
        """Makes the directory that a run begins from."""
        shutil.rmtree(store, ignore_errors=True)
        if self.rank:
            shutil.copytree(self.plain, store)

    def run(self, store: Path) -> None:
        """Converts, or computes compensators."""
        family = family_of(Checkpoint.open(self.source).config)
        if self.rank:
            compensate(
                self.source,
                store,
                family,
                base_level=2,
                rule="error",
                mean_rank=self.rank,
                progress=_silent,
                threads=2,
            )
        else:
            _convert(self.source, store)


def _silent(done: int, total: int) -> None:
    pass


def _convert(source: Path, store: Path) -> None:
    family, layout = family_of(Checkpoint.open(source).config), compute("cpu").layout
    convert(source, store, family, layout=layout, max_level=None, dense_bits=16, progress=_silent, threads=2)


def start(job: Job, store: Path) -> int:
    """Starts a job in a forked process, which has all imports; returns its process number."""
    child = os.fork()
    if not child:
        code = 1
        try:
            job.run(store)
            code = 0
        finally:
            os._exit(code)
    return child


def end(child: int) -> int:
    """Waits for a process; returns its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def whole(job: Job, store: Path) -> float:
    """Runs a job without a kill, in seconds.

    Raises:
        UserError: the conversion fails.
    """
    begin = time.perf_counter()
    code = end(start(job, store))
    if code:
        raise UserError(
            f"a model that converts in {job.source}", f"exit code {code}", "convert it by hand to see why"
        )
    return time.perf_counter() - begin


def run(job: Job, work: Path, kills: int, seed: int) -> dict[str, object]:
    """Kills runs of a job, and returns counts.

    Args:
        job: what is killed.
        work: an empty directory for stores.
        kills: how many.
        seed: of the moments.

    Returns:
        killed; states, the different sets of files that kills left; finished, conversions that ended before their kill;
        wrong, the numbers of kills behind which bytes differ; seconds of a whole conversion, and of everything.
    """
    begin, random = time.monotonic(), Random(seed)
    for i in range(TIMED):
        job.prepare(work / str(i))
    span = sorted(whole(job, work / str(i)) for i in range(TIMED))[TIMED // 2]
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
        if sys.stderr.isatty():
            left = (time.monotonic() - begin) / killed * (kills - killed)
            print(
                f"\r{killed} of {kills} kills, {len(wrong)} wrong, {left:.0f} s left ",
                end="",
                file=sys.stderr,
            )
    return {
        "killed": killed,
        "states": len(states),
        "finished": finished,
        "wrong": wrong,
        "conversion_s": round(span, 3),
        "seconds": round(time.monotonic() - begin, 1),
    }


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
                _convert(job.source, job.plain)
            counts = run(job, Path(work), given.kills, given.seed)
        except UserError as error:
            return failed("tools.reliability.kills", error)
        print(json.dumps(counts))
        return 1 if counts["wrong"] or counts["killed"] != given.kills else 0
    return 130


if __name__ == "__main__":
    sys.exit(main())
