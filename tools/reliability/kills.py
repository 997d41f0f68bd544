"""Kills conversions with SIGKILL at random moments, and compares what the next one makes of their files.

    python -m tools.reliability.kills [--model DIR] [--kills 1000] [--work DIR]

Every conversion is a process of its own. The k-th kill comes at a random moment of the k-th part of the time that a
whole conversion takes; a conversion of the same store then runs to its end, and all files must have the bytes of an
uninterrupted one. Exit code 0: they had after every kill; 1: not after each.
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

import xxhash

from edgemoe.commands.options import DEMO
from edgemoe.families.table import family_of
from edgemoe.kernels.registry import compute
from storage.checkpoint import Checkpoint
from storage.convert import convert
from storage.errors import UserError
from tools.command_line import failed, make_parser, positive

TIMED = 5
"""Whole conversions, whose median time is the span of the kills."""

_MOST_RUNS = 20
"""Conversions a kill, at most: some end before their kill."""


def contents(store: Path) -> dict[str, int]:
    """Name -> hash of every file in a directory."""
    return {path.name: xxhash.xxh3_64_intdigest(path.read_bytes()) for path in sorted(store.iterdir())}


def start(source: Path, store: Path) -> int:
    """Starts a conversion in a forked process, which has all imports; returns its process number."""
    child = os.fork()
    if not child:
        code = 1
        try:
            family = family_of(Checkpoint.open(source).config)
            layout, silent = compute("cpu").layout, lambda done, total: None
            convert(
                source,
                store,
                family,
                layout=layout,
                max_level=None,
                dense_bits=16,
                progress=silent,
                threads=2,
            )
            code = 0
        finally:
            os._exit(code)
    return child


def end(child: int) -> int:
    """Waits for a process; returns its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def whole(source: Path, store: Path) -> float:
    """Converts without a kill, in seconds.

    Raises:
        UserError: the conversion fails.
    """
    begin = time.perf_counter()
    code = end(start(source, store))
    if code:
        raise UserError(
            f"a model that converts in {source}", f"exit code {code}", "convert it by hand to see why"
        )
    return time.perf_counter() - begin


def run(source: Path, work: Path, kills: int, seed: int) -> dict[str, object]:
    """Kills conversions, and returns counts.

    Args:
        source: a checkpoint.
        work: an empty directory for stores.
        kills: how many.
        seed: of the moments.

    Returns:
        killed; states, the different sets of files that kills left; finished, conversions that ended before their kill;
        wrong, the numbers of kills behind which bytes differ; seconds of a whole conversion, and of everything.
    """
    begin, random = time.monotonic(), Random(seed)
    span = sorted(whole(source, work / str(i)) for i in range(TIMED))[TIMED // 2]
    straight, store = contents(work / "0"), work / "store"
    killed, finished, states, wrong = 0, 0, set(), list[int]()
    for _ in range(_MOST_RUNS * kills):
        if killed == kills:
            break
        shutil.rmtree(store, ignore_errors=True)
        child = start(source, store)
        time.sleep((killed + random.random()) / kills * span)
        os.kill(child, signal.SIGKILL)
        if end(child) != -signal.SIGKILL:
            finished += 1
            span *= 0.99  # it takes less time by now than when it was timed
            continue
        killed += 1
        states.add(frozenset(contents(store).items()) if store.exists() else frozenset())
        whole(source, store)
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
    given = parser.parse_args(argv)
    with TemporaryDirectory(dir=given.work) as work, suppress(KeyboardInterrupt):
        try:
            counts = run(given.model, Path(work), given.kills, given.seed)
        except UserError as error:
            return failed("tools.reliability.kills", error)
        print(json.dumps(counts))
        return 1 if counts["wrong"] or counts["killed"] != given.kills else 0
    return 130


if __name__ == "__main__":
    sys.exit(main())
