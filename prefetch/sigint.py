"""Ctrl-C at a safe point: between two acts on a tier, never within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """A SIGINT that may have come; `check` is the safe point that it waits for."""

    def __init__(self) -> None:
        self.pending = False

    def check(self) -> None:
        """Raises KeyboardInterrupt if a SIGINT has come since the last check."""
        if self.pending:
            self.pending = False
            raise KeyboardInterrupt


_held: Interrupt | None = None
"""Of the context that is open in the main thread."""


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Holds back SIGINT's KeyboardInterrupt until the next `check`, at the latest to the context's end.

    A second SIGINT before that is not held back, so that a disk which hangs can be escaped. A context within another
    is part of it, and its end one more safe point. Without effect outside of the main thread, where Python raises no
    KeyboardInterrupt, and where the program has a handler of its own, which then decides.
    """
    global _held
    if threading.current_thread() is not threading.main_thread():
        yield Interrupt()
        return
    if _held:
        try:
            yield _held
        finally:
            _held.check()
        return
    interrupt = Interrupt()
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def hold(number: int, frame: FrameType | None) -> None:
        interrupt.pending = not interrupt.pending
        if not interrupt.pending:
            signal.default_int_handler(number, frame)

    if ours:
        signal.signal(signal.SIGINT, hold)
    try:
        _held = interrupt
        yield interrupt
    finally:
        _held = None
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt.check()
