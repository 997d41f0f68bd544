"""Prefetches experts into free blocks while the chat waits for input."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from edgemoe.engine.engine import Engine
from edgemoe.machine.sigint import DeferredInterrupt
from edgemoe.storage.files.retry import GivingUp


@contextmanager
def idle_prefetch(engine: Engine) -> Iterator[None]:
    """Runs Engine.fill on a thread while the block runs, which must not use the engine. Leaving waits for the thread.

    A Ctrl-C during that wait is raised after it. Errors are only logged, since no request needs these experts yet.
    """
    ended, errors = threading.Event(), list[Exception]()

    def fill() -> None:
        try:
            engine.fill(lambda: not ended.is_set())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=fill, name="idle-prefetch", daemon=True)
    try:
        thread.start()
        yield
    finally:
        with DeferredInterrupt(), GivingUp():
            ended.set()
            if thread.ident is not None:
                thread.join()
        if errors:
            logging.getLogger(__name__).warning("prefetch into free blocks failed: %s", errors[0])
