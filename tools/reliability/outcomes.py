"""The outcome of mutated files: accepted, refused by a typed error, or neither."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from edgemoe.console.sizes import format_size
from edgemoe.errors import EdgemoeError
from edgemoe.machine.process import peak_resident_bytes, reset_peak, resident_bytes

LIMIT = 20.0
"""Seconds of one case."""


SHOWN = 5
"""Untyped cases of a parser that are printed."""


class OutOfTimeError(KeyboardInterrupt):
    """A case took longer than LIMIT. A KeyboardInterrupt passes every boundary that makes errors typed."""


@dataclass
class Outcome:
    """The counts of a parser's cases.

    Args:
        parser: its name.
        cases: number of all cases.
        typed, accepted, untyped: number of cases that were refused by a typed error, accepted, or neither.
        worst_s: seconds of the slowest case.
        worst_bytes: the largest growth of resident memory within a case.
        shown: the first untyped cases.
    """

    parser: str
    cases: int = 0
    typed: int = 0
    accepted: int = 0
    untyped: int = 0
    worst_s: float = 0.0
    worst_bytes: int = 0
    shown: list[str] = field(default_factory=list)


def count_case(out: Outcome, case: int, parse: Callable[[], object]) -> None:
    """Runs a case and adds its outcome."""
    reset_peak()
    before, start = resident_bytes(), time.monotonic()
    out.cases += 1
    try:
        with _limited():
            parse()
        out.accepted += 1
    except EdgemoeError:
        out.typed += 1
    except (Exception, OutOfTimeError) as error:
        out.untyped += 1
        if len(out.shown) < SHOWN:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            out.shown.append(f"case {case}: {type(error).__name__}: {str(error)[:120]!r} at {place}")
    out.worst_s = max(out.worst_s, time.monotonic() - start)
    out.worst_bytes = max(out.worst_bytes, peak_resident_bytes() - before)


@contextmanager
def _limited() -> Iterator[None]:
    """Raises OutOfTimeError in the block after LIMIT seconds. In the main thread only."""

    def stop(number: int, frame: object) -> None:
        raise OutOfTimeError(f"more than {LIMIT:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def as_table(outcomes: Sequence[Outcome]) -> str:
    """A Markdown table with a row for each parser."""
    rows = [
        "| file | cases | refused | accepted | untyped | slowest, ms | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        rows.append(
            f"| {each.parser} | {each.cases:,} | {each.typed:,} | {each.accepted:,} | {each.untyped} "
            f"| {1000 * each.worst_s:.0f} | {format_size(each.worst_bytes)} |"
        )
    return "\n".join(rows)
