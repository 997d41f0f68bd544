"""Reads mutated files of models with every parser, in one process, and counts what happens.

    python -m tools.reliability.mutations [--parser NAME] [--cases 100000] [--seed 0] [--json]

A case is one valid file with some bytes or values changed. Its outcome is *accepted*, *typed* (an error of edgemoe's
own, one line and an exit code for the user) or *untyped*: any other exception, or more than LIMIT seconds. An untyped
case is printed with its number; `--first NUMBER --cases 1` runs it again. Exit code 1 if there is one.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from edgemoe.console.progress import CountProgress
from tools.command_line import make_parser, positive
from tools.reliability.outcomes import Outcome, as_table, count_case
from tools.reliability.parsers import PARSERS, Parser, mutated

LEAST = 20
"""Cases that run although their time is over: a table without any would look like a success."""


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides the libraries' warnings about values, which repeat characters that no UTF-8 text can hold."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def run(
    name: str,
    parser: Parser,
    cases: range,
    seed: int,
    advance: Callable[[], None] = lambda: None,
    seconds: float = math.inf,
) -> Outcome:
    """Runs cases of one parser.

    Args:
        name: the name of the parser; with `seed` and a case's number it determines the case.
        parser: reads the files.
        cases: their numbers.
        seed: the seed of the mutations.
        advance: called after every case.
        seconds: time after which no case begins, but LEAST run in any case.

    Raises:
        EdgemoeError: a file is refused before it is changed.
    """
    out = Outcome(name)
    with _quiet(), TemporaryDirectory() as directory:
        files = {path: path.read_bytes() for path in parser.make(Path(directory))}
        for path in files:
            parser.parse(path)  # as it is; imports, too, are no part of a case
        until = time.monotonic() + seconds
        for case in cases:
            if out.cases >= LEAST and time.monotonic() > until:
                break
            random = Random(f"{seed}/{name}/{case}")
            path = random.choice(list(files))
            path.write_bytes(mutated(path, files[path], random))
            count_case(out, case, lambda path=path: parser.parse(path))  # type: ignore[misc]
            path.write_bytes(files[path])
            advance()
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.reliability.mutations", __doc__)
    parser.add_argument("--parser", choices=sorted(PARSERS), help="default: all, one after another")
    parser.add_argument("--cases", type=positive, default=100_000, help="of each parser; default: 100000")
    parser.add_argument("--first", type=int, default=0, help="number of the first case; default: 0")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; default: 0")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="most time of each parser; default: any"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a parser instead of a table")
    options = parser.parse_args(argv)
    cases, outcomes = range(options.first, options.first + options.cases), []
    for name in [options.parser] if options.parser else PARSERS:
        with CountProgress(name, options.cases) as progress:
            outcomes.append(
                run(name, PARSERS[name], cases, options.seed, progress.advance, 60 * options.minutes)
            )
        if options.json:
            print(json.dumps(asdict(outcomes[-1])), flush=True)
        for line in outcomes[-1].shown:
            print(f"{name}: {line}", file=sys.stderr)
    if not options.json:
        print(as_table(outcomes))
    return int(any(outcome.untyped for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
