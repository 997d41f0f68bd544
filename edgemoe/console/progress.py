"""Shows the progress of long work on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from edgemoe.console.input import obeys_escapes
from edgemoe.console.printable import printable
from edgemoe.console.sizes import format_size

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

_LINE_EVERY = 5.0
"""Seconds between plain lines."""


class ByteProgress:
    """Shows the progress of a job in bytes. A context manager. Imports rich on a terminal only.

    Args:
        what: the job, for people.
        clock: seconds.
    """

    _amount: Callable[[int], str] = staticmethod(format_size)

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = printable(what), clock
        self._started = self._shown = clock()
        self._bar: Progress | None = None
        if obeys_escapes(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                *self._columns(),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(self._what, total=None)

    def update(self, count: int, total: int) -> None:
        """Shows that `count` of `total` are finished; the callback of the job."""
        if self._bar:
            self._bar.start()  # not before: a job with nothing left to do has no total, and shows no bar
            self._bar.update(self._task, completed=count, total=total)
            return
        now = self._clock()
        if now - self._shown >= _LINE_EVERY or count >= total:
            self._shown = now
            left = f"{(now - self._started) * (total - count) / count:.0f} s left" if count else "starting"
            percent = 100 * count / total if total else 100
            amount = f"{self._amount(count)} of {self._amount(total)} ({percent:.0f} %)"
            print(f"{self._what}: {amount}, {left}", file=sys.stderr, flush=True)

    def _columns(self) -> tuple[ProgressColumn, ...]:
        from rich.progress import DownloadColumn, TransferSpeedColumn

        return DownloadColumn(), TransferSpeedColumn()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar:
            self._bar.stop()


class CountProgress(ByteProgress):
    """Shows the progress of a job in counted pieces.

    Args:
        what: the job, for people.
        total: number of pieces.
        clock: seconds.
    """

    _amount = staticmethod(str)

    def __init__(self, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(what, clock)
        self._done, self._total = 0, total
        self.update(0, total)

    def advance(self, pieces: int = 1) -> None:
        """Shows that more pieces are finished."""
        self._done += pieces
        self.update(self._done, self._total)

    def _columns(self) -> tuple[ProgressColumn, ...]:
        from rich.progress import MofNCompleteColumn

        return (MofNCompleteColumn(),)
