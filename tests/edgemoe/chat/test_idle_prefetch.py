"""edgemoe.chat.idle_prefetch: experts are read while a chat waits for input, and the wait for its end is short."""

from __future__ import annotations

import errno
import io
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
from engine_rig import PROMPT, engines_on
from integrity import check_integrity
from small_tokenizer import a_tokenizer
from terminals import Terminal

from edgemoe.api.model import Model
from edgemoe.chat.conversation import Conversation
from edgemoe.chat.ctrl_c import CtrlC
from edgemoe.chat.idle_prefetch import idle_prefetch
from edgemoe.chat.loop import _read_and_prefetch, run_chat
from edgemoe.chat.session import Chat, Printing
from edgemoe.console.input import Turn, open_turns
from edgemoe.engine.sampling import Sampling
from edgemoe.models.introduction import Introduction


@pytest.fixture
def engine(tiny_store, monkeypatch):
    """An engine in RAM with blocks for every expert, none of them resident."""
    for opened in engines_on(tiny_store, monkeypatch):
        yield opened(None)


def test_the_engine_fills_while_the_block_runs(engine) -> None:
    """A thread reads every expert and has ended after the block; then the engine can be used again."""
    deadline = time.monotonic() + 60
    with idle_prefetch(engine):
        while len(engine.vram.resident()) < engine.shape.experts:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert "idle-prefetch" not in [thread.name for thread in threading.enumerate()]
    engine.prefill(engine.sequences.new(), PROMPT)
    assert engine.take_counts().ssd_bytes == 0


def test_leaving_does_not_wait_for_all_experts(engine, monkeypatch) -> None:
    """An error within the block ends the prefetch after the reads that are under way."""
    begun, read = threading.Event(), engine.source._transfers._reader.read

    def slow(*arguments):
        begun.set()
        time.sleep(0.1)
        return read(*arguments)

    monkeypatch.setattr(engine.source._transfers._reader, "read", slow)
    with suppress(ZeroDivisionError), idle_prefetch(engine):
        assert begun.wait(60)
        raise ZeroDivisionError
    assert len(engine.vram.resident()) < engine.shape.experts
    check_integrity(engine.vram)


def test_leaving_does_not_wait_for_retries(engine, monkeypatch) -> None:
    """Where the disk fails, the block ends without the 5 s in which reads are tried again, and gives no warning."""
    begun = threading.Event()

    def fail(*arguments):
        begun.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with idle_prefetch(engine):
        assert begun.wait(60)
        start = time.monotonic()
    assert time.monotonic() - start < 1
    check_integrity(engine.vram)


def test_ctrl_c_while_the_prefetch_ends(engine, monkeypatch) -> None:
    """KeyboardInterrupt is raised after the last read has ended: the engine can be closed then."""
    begun, gate = threading.Event(), threading.Event()
    read = engine.source._transfers._reader.read

    def delayed(*arguments):
        begun.set()
        assert gate.wait(60)
        return read(*arguments)

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        gate.set()

    def wait_and_leave():
        with idle_prefetch(engine):
            assert begun.wait(60)
            threading.Thread(target=interrupt).start()

    monkeypatch.setattr(engine.source._transfers._reader, "read", delayed)
    with pytest.raises(KeyboardInterrupt):
        wait_and_leave()
    assert gate.is_set()
    engine.source.release_pins()  # raises if a request is open
    check_integrity(engine.vram)


def test_ctrl_c_after_a_turn_drops_it(engine, monkeypatch, capsys) -> None:
    """A turn that was read and not yet answered is dropped, and the chat goes on; an empty prompt ends it."""
    chat = SimpleNamespace(engine=engine, say=print)

    @contextmanager
    def interrupted(engine):
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr("edgemoe.chat.loop.idle_prefetch", interrupted)
    source, ctrl_c = SimpleNamespace(read=lambda: Turn("the fox")), CtrlC(as_key=False)
    assert _read_and_prefetch(chat, source, ctrl_c) is None
    assert "dropped" in capsys.readouterr().out

    def empty():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _read_and_prefetch(chat, SimpleNamespace(read=empty), ctrl_c)


def test_an_error_is_logged(engine, monkeypatch, caplog) -> None:
    """The block and the chat go on."""

    def fail(go_on):
        raise RuntimeError("a device refused a copy")

    monkeypatch.setattr(engine, "fill", fail)
    with idle_prefetch(engine):
        pass
    assert "refused a copy" in caplog.text


@pytest.mark.e2e
def test_a_chat_prefetches_at_a_terminal(tiny_store, tmp_path) -> None:
    """Every expert becomes resident before the first question."""
    with Terminal(tmp_path, "chat", "--model", tiny_store) as terminal:
        terminal.ready()
        deadline = time.monotonic() + 60
        while "16 of 16 experts" not in terminal.enter("/mem"):
            assert time.monotonic() < deadline


def test_a_pipe_is_read_without_prefetch(engine, monkeypatch) -> None:
    """The lines of a script are there already, and nothing is read for an empty one."""
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    conversation = Conversation(Model(engine, a_tokenizer(), Sampling(0, 1, 0, 1, 0, 2, frozenset())))
    run_chat(Chat(engine, conversation, Printing(as_json=True)), open_turns({}), Introduction("tiny"))
    assert engine.vram.resident() == {}
