"""Shows on a terminal that torch is imported and weights are loaded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from edgemoe.console.input import obeys_escapes
from edgemoe.machine.process import resident_bytes

_EVERY = 0.1
"""Seconds between updates of the bar."""


@contextmanager
def starting(message: str) -> Iterator[None]:
    """Shows a spinner on stderr while the block runs; nothing where stderr is no terminal."""
    if not obeys_escapes(sys.stderr):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


@contextmanager
def loading(total: int) -> Iterator[None]:
    """Shows a bar on stderr while weights are read into memory; nothing where stderr is no terminal.

    The bar follows the process's resident memory, so readers of weights report no progress.

    Args:
        total: bytes that will be read.
    """
    if not obeys_escapes(sys.stderr):
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    before, done = resident_bytes(), threading.Event()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=total)

        def watch() -> None:
            while not done.wait(_EVERY):
                bar.update(task, completed=min(max(resident_bytes() - before, 0), total))

        watcher = threading.Thread(target=watch, name="loading-bar", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
