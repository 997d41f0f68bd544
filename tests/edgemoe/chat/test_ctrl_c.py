"""Ctrl-C during an answer: the first cancels, the second ends the program, another handler stays."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest

from edgemoe.chat.ctrl_c import CtrlC, InterruptedTwice
from edgemoe.chat.loop import _answer
from edgemoe.console.input import Turn


@pytest.fixture
def python_handler() -> Iterator[None]:
    """Installs Python's own handler, as in a program started from a terminal; a test run may have another."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def twice() -> None:
    """Sends Ctrl-C, and again while the first unwinds."""
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.raise_signal(signal.SIGINT)


def test_the_first_raises_keyboard_interrupt(python_handler):
    """It is no InterruptedTwice, and leaving the chat restores Python's handler."""
    with CtrlC(as_key=True) as chat:
        with pytest.raises(KeyboardInterrupt) as caught, chat.answering():
            signal.raise_signal(signal.SIGINT)
        assert caught.type is KeyboardInterrupt
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_raises_interrupted_twice(python_handler):
    """It does so during the unwinding of the first; the next answer starts from zero."""
    with CtrlC(as_key=True) as chat:
        with pytest.raises(InterruptedTwice), chat.answering():
            twice()
        with pytest.raises(KeyboardInterrupt) as caught, chat.answering():
            signal.raise_signal(signal.SIGINT)
        assert caught.type is KeyboardInterrupt


def test_between_a_turn_and_its_answer_it_cancels_the_answer(python_handler):
    """The answer does not begin; the next one does."""
    begun = []
    with CtrlC(as_key=True) as chat:
        with chat.reading():
            pass
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), chat.answering():
            begun.append(1)
        with chat.answering():
            begun.append(2)
    assert begun == [2]


@pytest.mark.parametrize("as_key", [True, False])
def test_between_an_answer_and_the_next_turn_it_does_nothing(python_handler, as_key):
    """A cancellation that came too late cancels neither the prompt nor the next answer."""
    with CtrlC(as_key=as_key) as chat:
        with chat.answering():
            pass
        signal.raise_signal(signal.SIGINT)
        with chat.reading():
            pass
        with chat.answering():
            pass


def test_at_a_prompt_it_is_a_key_or_raises(python_handler):
    """A line editor ends by the key, and the signal comes only before or after it; plain lines end by the signal."""
    with CtrlC(as_key=True) as chat:
        with chat.reading():
            signal.raise_signal(signal.SIGINT)
        with chat.answering():
            pass
    with CtrlC(as_key=False) as chat, pytest.raises(KeyboardInterrupt), chat.reading():
        signal.raise_signal(signal.SIGINT)


def test_an_ignored_signal_stays_ignored(python_handler):
    """A background job, which ignores Ctrl-C, ignores it in a chat too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with CtrlC(as_key=True) as chat, chat.answering():
        twice()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_once_drops_the_turn_and_twice_ends_the_chat(python_handler):
    """At a terminal the chat continues after the first and prints a line; the second propagates."""
    printed: list[str] = []

    def once(text: str) -> None:
        signal.raise_signal(signal.SIGINT)

    turn = Turn("a question")
    with CtrlC(as_key=True) as ctrl_c:
        _answer(SimpleNamespace(ask=once, say=printed.append), turn, ctrl_c)
        assert "cancelled" in printed[0]
        with pytest.raises(InterruptedTwice):
            _answer(SimpleNamespace(ask=lambda text: twice(), say=printed.append), turn, ctrl_c)
    assert len(printed) == 1


def test_in_a_pipe_it_ends_the_chat(python_handler):
    """A script must not continue with incomplete answers."""
    ask = partial(signal.raise_signal, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        _answer(SimpleNamespace(ask=lambda text: ask()), Turn("a question"), None)
