"""One conversion of a model at a time: another process's is waited for, and finished where that process ends early."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from edgemoe.console.input import obeys_escapes
from edgemoe.console.loading import spinner
from edgemoe.console.width import say
from edgemoe.errors import StoreBusy, UserError
from edgemoe.storage.files.lock import StoreLock, writer_of

POLL_EVERY = 0.2
"""Seconds between two looks at a conversion in another process."""

LINE_EVERY = 10.0
"""Seconds between two lines that say that this process still waits, where stderr is no terminal."""


def convert_once(
    name: str,
    store: Path,
    is_needed: Callable[[], bool],
    convert: Callable[[], object],
    *,
    download: Path | None = None,
) -> None:
    """Calls `convert` unless it is not needed; first waits for another process that converts the same model.

    If that process finishes the store, nothing is converted here; if it fails or is killed, `convert` resumes.

    Args:
        name: the model's, for people.
        store: the directory that `convert` locks; it may not exist yet.
        is_needed: whether the store is still to be made.
        convert: raises StoreBusy, with nothing done, where another process has begun meanwhile.
        download: another directory that `convert` locks, for all the time that it takes.
    """
    locked = [store, download] if download else [store]
    while is_needed():
        _wait(name, locked, is_needed)
        if not is_needed():
            return
        with suppress(StoreBusy):  # another process has begun meanwhile
            convert()
            return


def _wait(name: str, locked: Sequence[Path], is_needed: Callable[[], bool]) -> None:
    """Waits until no other process converts the model, and shows on stderr which one does and that it still does."""
    store, start = locked[0], time.monotonic()

    def over() -> bool:
        return _free(locked) or (not is_needed() and _free([store]))

    if over():
        return
    pid = next(filter(None, map(writer_of, locked)), None)
    process, shown = f"process {pid}" if pid else "another process", start
    say(f"{name} is being converted by {process} into {store}: waiting for it (Ctrl-C ends only this wait)")
    with spinner(f"waiting for {process}"):
        while not over():
            time.sleep(POLL_EVERY)
            now = time.monotonic()
            if now - shown >= LINE_EVERY and not obeys_escapes(sys.stderr):
                shown = now
                say(f"still waiting for {process} to convert {name}, {now - start:.0f} s")
    if is_needed():
        say(f"{process} ended before the store was finished: the conversion is resumed here")


def _free(directories: Sequence[Path]) -> bool:
    """Whether no process writes to any of these directories."""
    try:
        for directory in directories:
            if directory.is_dir():
                StoreLock(directory, exclusive=False).close()
    except StoreBusy:
        return False
    except UserError:  # removed meanwhile, or without locks: the conversion says so
        return True
    return True
