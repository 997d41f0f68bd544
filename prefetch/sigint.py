"""Ctrl-C at a safe point: between two changes of a tier, never within one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class DeferredInterrupt:
    """A context that defers SIGINT's KeyboardInterrupt to the next `check`, at the latest to its end.

    A second SIGINT before that is not deferred, so that a hanging disk can be escaped. A context within another one is
    part of it, and its end is one more safe point. Without effect outside of the main thread, where Python raises no
    KeyboardInterrupt, and where the program has a handler of its own, which then decides.
    """

    _pending = False
    """Whether a SIGINT has come since the last check; of the outermost context of the main thread."""
    _depth = 0

    def __enter__(self) -> DeferredInterrupt:
        kind = DeferredInterrupt
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            kind._depth += 1
            if kind._depth == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, _defer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._main:
            return
        DeferredInterrupt._depth -= 1
        if not DeferredInterrupt._depth and signal.getsignal(signal.SIGINT) is _defer:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.check()

    def check(self) -> None:
        """Raises KeyboardInterrupt if a SIGINT has come since the last check."""
        if DeferredInterrupt._pending and self._main:
            DeferredInterrupt._pending = False
            raise KeyboardInterrupt


def _defer(number: int, frame: FrameType | None) -> None:
    pending = DeferredInterrupt._pending = not DeferredInterrupt._pending
    if not pending:
        signal.default_int_handler(number, frame)
