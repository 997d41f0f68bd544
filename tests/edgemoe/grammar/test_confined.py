"""Grammars are compiled and followed in processes that the system ends at limits of time and memory."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from scripted import END, chatml_tokenizer

from edgemoe.errors import UserError
from edgemoe.grammar.confined import Cancellation, Cancelled
from edgemoe.grammar.grammars import Grammars
from edgemoe.grammar.lark import formed_answer

pytest.importorskip("llguidance")

from edgemoe.grammar.matcher import Grammar, Matcher, Vocabulary
from edgemoe.grammar.process import GRAMMAR_BYTES

ENDLESS = {"allOf": [{"type": "string", "pattern": f".*a.{{{i * 10}}}b.*"} for i in range(1, 40)]}
"""Compiling it takes minutes, and memory without an end."""

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def words():
    words = Vocabulary(chatml_tokenizer(), 320, frozenset({END}))
    yield words
    words.process.close()


def text(words: Vocabulary, value: object) -> str:
    return formed_answer(words, {"const": value})


def parents() -> dict[int, int]:
    """Process id -> its parent's, without ended ones."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(stat.parent.name)] = int(parent)
    return found


def processes(words: Vocabulary) -> set[int]:
    """Ids of the processes of a vocabulary's grammars and answers."""
    found, parent_of = set(), parents()
    more = {words.process.pid}
    while more := {pid for pid, parent in parent_of.items() if parent in more}:
        found |= more
    return found


def wait_for(words: Vocabulary, count: int) -> None:
    end = time.monotonic() + 10
    while len(processes(words)) != count:
        assert time.monotonic() < end, processes(words)
        time.sleep(0.01)


def test_compiling_that_is_cancelled_ends_at_once(words):
    """Its process is gone, and the next grammar compiles."""
    gc.collect()
    cancellation = Cancellation()
    timer = threading.Timer(0.1, cancellation.cancel)
    timer.start()
    start = time.monotonic()
    with pytest.raises(Cancelled):
        Grammar(words, formed_answer(words, ENDLESS), cancellation)
    assert time.monotonic() - start < 2
    wait_for(words, 0)
    with pytest.raises(Cancelled):
        Grammar(words, text(words, "a"), cancellation)
    assert Matcher(Grammar(words, text(words, "a"))).allowed().any()


@pytest.fixture
def limited(tmp_path, monkeypatch):
    """Makes a vocabulary whose process has another limit, as a line of its script."""
    script = Path(__file__).parents[3] / "edgemoe/grammar/process.py"
    made = list[Vocabulary]()

    def make(limit: str) -> Vocabulary:
        source = script.read_text().replace("Result = TypeVar", f"{limit}\n\nResult = TypeVar")
        (tmp_path / "process.py").write_text(source)
        monkeypatch.setattr("edgemoe.grammar.confined.__file__", str(tmp_path / "confined.py"))
        made.append(Vocabulary(chatml_tokenizer(), 320, frozenset({END})))
        return made[-1]

    yield make
    for each in made:
        each.process.close()


@pytest.mark.parametrize("limit", ["COMPILE_SECONDS = 1", "GRAMMAR_BYTES = 24 << 20"])
def test_the_system_ends_compiling_at_a_limit(limit, limited):
    """The error says both limits; a grammar that takes less compiles afterwards in the same way."""
    words, own = limited(limit), resident()
    with pytest.raises(UserError, match="5 s of computing and 256 MiB"):
        Grammar(words, formed_answer(words, ENDLESS))
    assert resident() - own < 8 << 20
    Grammar(words, text(words, "a"))


@pytest.mark.parametrize(
    ("limit", "fault"),
    [
        ("MOST_ITEMS = 20", "row has .* items; max is 20"),
        ("MOST_LEXER_STATES = 30", "too many states"),
        ("MOST_LEXER_FUEL = 50", "too many expressions"),
        ("MOST_STEP_ITEMS = 20", "Too many items .limit 20"),
    ],
)
def test_a_grammar_beyond_a_limit_of_the_parser_is_refused(limit, fault, limited):
    """60 optional properties exceed four small limits, when they are compiled or followed; the message names each."""
    properties = {f"p{i}": {"type": "integer"} for i in range(60)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    words = limited(limit)

    def follow() -> None:
        answer = Matcher(Grammar(words, formed_answer(words, schema)))
        for _ in range(10):
            answer.take(int(np.flatnonzero(answer.allowed())[0]))

    with pytest.raises(UserError, match=fault):
        follow()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_processes_end_with_their_grammars(words):
    """Each grammar and each answer has one, which ends when it is dropped."""
    gc.collect()
    wait_for(words, 0)
    grammar = Grammar(words, text(words, "ab"))
    answers = [Matcher(grammar), Matcher(grammar)]
    for answer in answers:
        answer.take(int(np.flatnonzero(answer.allowed())[0]))
    wait_for(words, 3)
    del grammar, answers, answer
    gc.collect()
    wait_for(words, 0)


def test_a_process_that_was_ended_starts_again(words):
    """So does a kept grammar whose process was ended: it is compiled again."""
    grammars = Grammars(words)
    first = grammars.compile(text(words, "a"))
    os.kill(words.process.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while not words.process._control.ended:
        assert time.monotonic() < end
    assert Matcher(grammars.compile(text(words, "b"))).allowed().any()
    first._process.close()
    again = grammars.compile(text(words, "a"))
    assert again is not first
    assert Matcher(again).allowed().any()


def test_grammars_and_refusals_are_kept(words, monkeypatch):
    """A second request for the same grammar starts no process."""
    grammars = Grammars(words)
    one = grammars.compile(text(words, 1))
    broken = formed_answer(words, {"type": "string", "pattern": "^(?=a)"})
    with pytest.raises(UserError, match="look-around") as refused:
        grammars.compile(broken)
    monkeypatch.setattr(words.process, "start", None)
    assert grammars.compile(text(words, 1)) is one
    with pytest.raises(UserError, match="look-around") as again:
        grammars.compile(broken)
    assert str(again.value) == str(refused.value)


def test_the_memory_of_grammars_is_bounded(words):
    """A kept grammar makes room for another; one in use does not, and the wait for it can be cancelled."""
    grammars, cancellation = Grammars(words, most_bytes=GRAMMAR_BYTES), Cancellation()
    one = grammars.compile(text(words, 1))
    one.bytes = 1  # as if compiling had taken memory
    threading.Timer(0.1, cancellation.cancel).start()
    with pytest.raises(Cancelled):
        grammars.compile(text(words, 2), cancellation)
    assert not cancellation.begun
    del one
    assert grammars.compile(text(words, 2))
