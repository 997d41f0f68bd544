"""The time in which a person reads and types, used: experts come into free room meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from edgemoe.engine.engine import Engine
from prefetch.sigint import DeferredInterrupt


@contextmanager
def filling(engine: Engine) -> Iterator[None]:
    """Has Engine.fill run beside the block, which must not use the engine; its end waits until fill has ended.

    A Ctrl-C during that wait is raised behind it. What goes wrong is only logged: nobody has asked for anything yet.
    """
    ended, errors = threading.Event(), list[Exception]()

    def fill() -> None:
        try:
            engine.fill(lambda: not ended.is_set())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=fill, name="filling", daemon=True)
    try:
        thread.start()
        yield
    finally:
        with DeferredInterrupt():
            ended.set()
            if thread.ident is not None:
                thread.join()
        if errors:
            logging.getLogger(__name__).warning("experts were to be read into free room: %s", errors[0])
