"""Shows on a terminal that torch is imported and weights are loaded."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from edgemoe.console.input import obeys_escapes
from edgemoe.machine.process import resident_bytes


@contextmanager
def starting(message: str) -> Iterator[None]:
    """Shows a spinner while the block imports packages, without Python's garbage collection.

    What an import makes stays, and collections, which look at all of it again and again, take a tenth of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with spinner(message):
            yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def spinner(message: str) -> Iterator[None]:
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
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    class ResidentBar(Progress):
        """Reads the resident memory each time that rich draws the bar."""

        def get_renderables(self) -> Iterable[RenderableType]:
            done = min(max(resident_bytes() - before, 0), total)
            for task in self.task_ids:
                self.update(task, completed=done)
            return super().get_renderables()

    before = resident_bytes()
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with ResidentBar(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task("loading", total=total)
        yield
