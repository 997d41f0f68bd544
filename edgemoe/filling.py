"""The time in which a person reads and types, used: experts come into free room meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from edgemoe.engine import Engine


@contextmanager
def filling(engine: Engine) -> Iterator[None]:
    """Has Engine.fill run beside the block, which must not use the engine; its end waits until fill has ended."""
    ended = threading.Event()
    thread = threading.Thread(
        target=engine.fill, args=(lambda: not ended.is_set(),), name="filling", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
