"""edgemoe/chat/ctrl_c.py: the first Ctrl-C cancels, the second ends the program, a foreign handler stays."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from edgemoe.chat.ctrl_c import InterruptedTwice, counting_interrupts
from edgemoe.chat.loop import _take
from edgemoe.console.input import Turn


@pytest.fixture
def hearing() -> Iterator[None]:
    """Ctrl-C is Python's to handle, as in a program started from a terminal; tests may run where it is not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def twice() -> None:
    """Ctrl-C, and once more while the first unwinds."""
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.raise_signal(signal.SIGINT)


def test_the_first_is_a_plain_one(hearing):
    """It can be told from a second one, and leaving puts Python's own handler back."""
    with pytest.raises(KeyboardInterrupt) as caught, counting_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert caught.type is KeyboardInterrupt
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_is_another(hearing):
    """Also while the first is still unwinding; the next turn counts from the start."""
    with pytest.raises(InterruptedTwice), counting_interrupts():
        twice()
    with pytest.raises(KeyboardInterrupt) as caught, counting_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert caught.type is KeyboardInterrupt


def test_a_background_job_stays_deaf(hearing):
    """Where Ctrl-C is ignored it goes on being ignored."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with counting_interrupts():
        twice()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_once_drops_the_turn_and_twice_ends_the_chat(hearing):
    """At a terminal the first leaves the chat going, with a word on what happened; the second gets through it."""
    said: list[str] = []

    def once(text: str) -> None:
        signal.raise_signal(signal.SIGINT)

    turn = Turn("a question")
    _take(SimpleNamespace(ask=once, say=said.append), turn, forgiving=True)
    assert "cancelled" in said[0]
    with pytest.raises(InterruptedTwice):
        _take(SimpleNamespace(ask=lambda text: twice(), say=said.append), turn, forgiving=True)
    assert len(said) == 1
