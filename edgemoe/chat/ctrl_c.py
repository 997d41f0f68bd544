"""Ctrl-C in a chat at a terminal: during an answer the first cancels the answer, the second ends the program."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from types import FrameType


class InterruptedTwice(KeyboardInterrupt):
    """A second Ctrl-C before the first was handled."""


class _State(Enum):
    BETWEEN, PROMPT, ANSWER = range(3)


class CtrlC:
    """A context that decides what SIGINT does in a chat, by what the chat is doing.

    In an answer the first raises KeyboardInterrupt and every later one InterruptedTwice: a second may interrupt the
    unwinding of the first and leave state half changed, so after it only the program's end may follow. At the prompt it
    raises KeyboardInterrupt, unless the prompt reads Ctrl-C as a key. Between a turn and its answer it cancels the
    answer; between an answer and the next prompt there is nothing to cancel. Does nothing where Python does not handle
    Ctrl-C (a background job, another handler).

    Args:
        as_key: the prompt is a line editor, to which Ctrl-C is a key and not a signal.
    """

    def __init__(self, *, as_key: bool) -> None:
        self._as_key = as_key
        self._state, self._came, self._installed = _State.BETWEEN, False, False

    def __enter__(self) -> CtrlC:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *exc: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A block that reads a turn."""
        self._state = _State.PROMPT
        try:
            yield
        finally:
            self._came, self._state = False, _State.BETWEEN

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A block that answers a turn. Raises KeyboardInterrupt at once if Ctrl-C came since the turn was read."""
        self._state = _State.ANSWER
        try:
            if self._came:
                raise KeyboardInterrupt
            yield
        finally:
            self._came, self._state = False, _State.BETWEEN

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._state is _State.PROMPT and self._as_key:
            return
        if self._state is _State.ANSWER and self._came:
            raise InterruptedTwice
        self._came = True
        if self._state is not _State.BETWEEN:
            raise KeyboardInterrupt
