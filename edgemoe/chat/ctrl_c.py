"""Ctrl-C during an answer: the first cancels the answer, the second ends the program."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class InterruptedTwice(KeyboardInterrupt):
    """A second Ctrl-C before the first was handled."""


@contextmanager
def counting_interrupts() -> Iterator[None]:
    """Makes the first Ctrl-C in the block raise KeyboardInterrupt and every later one InterruptedTwice.

    A second Ctrl-C may interrupt the unwinding of the first and leave state half changed: after InterruptedTwice only
    the program's end may follow. Does nothing where Python does not handle Ctrl-C (a background job, another handler).
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if interrupted:
            raise InterruptedTwice
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
