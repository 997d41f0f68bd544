"""Ctrl-C in a chat: the first cancels an answer, the second ends the program, the line editor reads it as a key."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from edgemoe.chat.ctrl_c import CtrlC, InterruptedTwice
from edgemoe.chat.loop import _answer, _read_and_prefetch
from edgemoe.console.input import EditedTurns, Turn


@pytest.fixture
def python_handler() -> Iterator[None]:
    """Installs Python's own handler, as in a program started from a terminal; a test run may have another."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[PipeInput]:
    """The keys that line editors read."""
    monkeypatch.setenv("TERM", "xterm")
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        yield keys


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


def test_around_the_line_editor_it_does_not_end_the_chat(
    python_handler: None, typed: PipeInput, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGINT just before and just after raw mode is the chat's: the editor sets no handler and reads the turn."""
    handlers: list[object] = []
    set_handler = signal.signal

    def record(number: int, handler: object) -> object:
        handlers.extend([handler] * (number == signal.SIGINT))
        return set_handler(number, handler)

    @contextmanager
    def raw_mode() -> Iterator[None]:
        signal.raise_signal(signal.SIGINT)
        yield
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(typed, "raw_mode", raw_mode)
    editor = EditedTurns({}, tmp_path / "history")
    with CtrlC(as_key=True) as chat:
        monkeypatch.setattr(signal, "signal", record)
        threading.Timer(0.1, typed.send_text, ["a question\r"]).start()
        with chat.reading():
            try:
                assert editor.read() == Turn("a question")
            except KeyboardInterrupt:  # would end the test run
                pytest.fail("the prompt raised KeyboardInterrupt")
        monkeypatch.setattr(signal, "signal", set_handler)
    assert handlers == []


def test_directly_after_enter_it_drops_the_turn(
    python_handler: None, typed: PipeInput, tmp_path: Path
) -> None:
    """Read as a key together with Enter it drops that turn and what was typed before it, and not the next turn."""
    printed: list[str] = []
    chat = SimpleNamespace(engine=SimpleNamespace(fill=lambda go_on: None), say=printed.append)
    typed.send_text("a question\rhalf\x03another\r")
    editor = EditedTurns({}, tmp_path / "history")
    with CtrlC(as_key=True) as ctrl_c:
        assert _read_and_prefetch(chat, editor, ctrl_c) is None
        assert "cancelled" in printed[0]
        assert _read_and_prefetch(chat, editor, ctrl_c) == Turn("another")
        typed.send_text("\x03")
        with pytest.raises(KeyboardInterrupt):
            _read_and_prefetch(chat, editor, ctrl_c)
    assert len(printed) == 1
