"""Ctrl-C during an answer: the first cancels, the second ends the program, another handler stays."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from edgemoe.chat.ctrl_c import InterruptedTwice, counting_interrupts
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
    """It is no InterruptedTwice, and leaving the block restores Python's handler."""
    with pytest.raises(KeyboardInterrupt) as caught, counting_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert caught.type is KeyboardInterrupt
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_raises_interrupted_twice(python_handler):
    """It does so during the unwinding of the first; the next block starts from zero."""
    with pytest.raises(InterruptedTwice), counting_interrupts():
        twice()
    with pytest.raises(KeyboardInterrupt) as caught, counting_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert caught.type is KeyboardInterrupt


def test_an_ignored_signal_stays_ignored(python_handler):
    """A background job, which ignores Ctrl-C, ignores it inside the block too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with counting_interrupts():
        twice()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_once_drops_the_turn_and_twice_ends_the_chat(python_handler):
    """At a terminal the chat continues after the first and prints a line; the second propagates."""
    printed: list[str] = []

    def once(text: str) -> None:
        signal.raise_signal(signal.SIGINT)

    turn = Turn("a question")
    _answer(SimpleNamespace(ask=once, say=printed.append), turn, interactive=True)
    assert "cancelled" in printed[0]
    with pytest.raises(InterruptedTwice):
        _answer(SimpleNamespace(ask=lambda text: twice(), say=printed.append), turn, interactive=True)
    assert len(printed) == 1
