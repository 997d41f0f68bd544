"""Ctrl-C at a safe point: between two changes of a tier, never within one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, ClassVar

CHECK_EVERY = 0.1
"""Seconds of a wait for transfers after which a Ctrl-C is raised: a failing read is tried again for seconds."""


class DeferredInterrupt:
    """A context that defers the program's handler of SIGINT to the next `check`, at the latest to its end.

    The handler is Python's own, which raises KeyboardInterrupt, or any other Python function. A second SIGINT before
    that point is not deferred: the handler is called for both at once, so that a hanging disk can be escaped. A context
    within another one is part of it, and its end is one more safe point. Without effect outside of the main thread,
    where Python calls no handlers, and where the signal is ignored or ends the process.
    """

    _handler: ClassVar[Callable[[int, FrameType | None], Any]] = signal.default_int_handler
    """The handler that the outermost context of the main thread defers."""
    pending = False
    """Whether a SIGINT has come since the last check; of the outermost context."""
    _depth = 0

    def __enter__(self) -> DeferredInterrupt:
        kind = DeferredInterrupt
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            handler = signal.getsignal(signal.SIGINT)
            if not kind._depth and callable(handler):
                kind._handler = handler
                signal.signal(signal.SIGINT, _defer)
            # Only now: a signal before the new handler raises, and no __exit__ follows.
            kind._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._main:
            return
        DeferredInterrupt._depth -= 1
        if not DeferredInterrupt._depth and signal.getsignal(signal.SIGINT) is _defer:
            signal.signal(signal.SIGINT, DeferredInterrupt._handler)
        if DeferredInterrupt.pending:
            self.check()

    def check(self) -> None:
        """Calls the deferred handler if a SIGINT has come since the last check; Python's raises KeyboardInterrupt."""
        if DeferredInterrupt.pending and self._main:
            DeferredInterrupt.pending = False
            DeferredInterrupt._handler(signal.SIGINT, None)


def _defer(number: int, frame: FrameType | None) -> None:
    kind = DeferredInterrupt
    kind.pending = not kind.pending
    if kind.pending:
        return
    try:
        kind._handler(number, frame)  # the first signal
    finally:
        kind._handler(number, frame)
