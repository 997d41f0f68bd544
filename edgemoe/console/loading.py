"""What a terminal shows between the command and the first prompt."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from edgemoe.console.input import obeys_escapes
from edgemoe.machine.process import resident_bytes

_EVERY = 0.1
"""Seconds between looks at how far loading is."""


@contextmanager
def starting(what: str) -> Iterator[None]:
    """A spinner on stderr while the block runs, gone afterwards; nothing where stderr is no terminal."""
    if not obeys_escapes(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


@contextmanager
def loading(total: int, memory: Callable[[], int] = resident_bytes) -> Iterator[None]:
    """A bar on stderr while weights are read into memory, gone afterwards; nothing where stderr is no terminal.

    How far it is follows from what the process has resident, so that nobody who reads weights need tell.

    Args:
        total: bytes that will be read.
        memory: bytes resident now.
    """
    if not obeys_escapes(sys.stderr):
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    before, done = memory(), threading.Event()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=total)

        def watch() -> None:
            while not done.wait(_EVERY):
                bar.update(task, completed=min(max(memory() - before, 0), total))

        watcher = threading.Thread(target=watch, name="loading-bar", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
