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


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Holds back SIGINT's KeyboardInterrupt until the next `check`, at the latest to the context's end.

    A second SIGINT before that is not held back, so that a disk which hangs can be escaped. Without effect
    outside of the main thread, where Python raises no KeyboardInterrupt, and where the program has a
    handler of its own, which then decides.
    """
    interrupt = Interrupt()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield interrupt
        return

    def hold(number: int, frame: FrameType | None) -> None:
        interrupt.pending = not interrupt.pending
        if not interrupt.pending:
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt.check()
