"""Ctrl-C while an answer streams: the first cancels the answer, the second ends the program."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class InterruptedTwice(KeyboardInterrupt):
    """Ctrl-C once more, before the first had been dealt with."""


@contextmanager
def counting_interrupts() -> Iterator[None]:
    """Inside, the first Ctrl-C raises KeyboardInterrupt and every further one InterruptedTwice.

    A second one may come while the first is still unwinding, so that what was being done is left half-way:
    after an InterruptedTwice nothing but the program's end may follow. Does nothing where Ctrl-C is not
    Python's to handle (a background job, another handler).
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    heard = False

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        if heard:
            raise InterruptedTwice
        heard = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
