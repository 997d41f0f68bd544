"""Mutations of every file that a parser reads: no untyped error, and a runner that would notice one."""

from __future__ import annotations

import json
import logging
import time
import warnings
from pathlib import Path
from random import Random

import pytest

from edgemoe.errors import BadHeader
from tools.reliability import mutations, outcomes, samples
from tools.reliability.mutations import main, run
from tools.reliability.mutators import mutate_bytes, mutate_json
from tools.reliability.outcomes import Outcome, as_table
from tools.reliability.parsers import EVERY_FAMILY, PARSERS, Parser

CASES = 60
SECONDS = 0.5
"""Time for one parser; on a busy machine it sees fewer cases."""


@pytest.mark.e2e
@pytest.mark.parametrize("name", [name for name in PARSERS if name != EVERY_FAMILY])
def test_no_mutation_raises_an_untyped_error(name):
    """Valid files are accepted, and of mutated ones some are refused and none raises another error."""
    found = run(name, PARSERS[name], range(CASES), seed=1, seconds=SECONDS)
    assert found.shown == []
    assert found.untyped == 0
    assert found.typed > 0
    assert found.typed + found.accepted == found.cases


@pytest.mark.folders
@pytest.mark.timeout(3600)
def test_no_mutated_config_of_any_family_raises_an_untyped_error():
    """Ten thousand mutated configs, of all families, are derived or refused."""
    found = run(EVERY_FAMILY, PARSERS[EVERY_FAMILY], range(10_000), seed=1)
    assert found.shown == []
    assert (found.cases, found.untyped) == (10_000, 0)
    assert found.typed > found.accepted > 0


def raising(path: Path) -> None:
    """A parser that fails in all possible ways: by the first digit of the file's number."""
    number = json.loads(path.read_bytes())
    if isinstance(number, int) and number > 0:
        raise BadHeader("a", "b", "c")
    if isinstance(number, list | dict):
        raise KeyError(str(number)[:20])
    if number == "x":
        time.sleep(5)


@pytest.mark.e2e
def test_the_runner_counts_every_outcome(monkeypatch):
    """Typed errors, accepted files, other errors and cases that take too long, each with what its case was."""
    monkeypatch.setattr(outcomes, "LIMIT", 0.05)
    monkeypatch.setattr(mutations, "mutated", lambda path, raw, random: random.choice(VALUES))

    def make(directory: Path) -> list[Path]:
        (directory / "file").write_text("0")
        return [directory / "file"]

    found = run("some", Parser(make, raising), range(60), seed=0)
    chosen = [case_value(case) for case in range(60)]
    counts = [chosen.count(value) for value in VALUES]
    assert (found.typed, found.accepted, found.untyped) == (counts[0], counts[1], counts[2] + counts[3])
    assert 0.05 <= found.worst_s < 5
    assert any("KeyError" in line for line in found.shown)
    slow = run("some", Parser(make, raising), range(chosen.index(b'"x"'), chosen.index(b'"x"') + 1), seed=0)
    assert "OutOfTimeError" in slow.shown[0]
    assert "some" in as_table([found])


VALUES = [b"1", b"0", b"[]", b'"x"']


def case_value(case: int) -> bytes:
    """The bytes that the runner above gives its parser in a case: random numbers come from seed, name and case."""
    random = Random(f"0/some/{case}")
    random.choice([Path("file")])
    return random.choice(VALUES)


def test_a_file_that_is_wrong_from_the_start_is_reported(tmp_path):
    """A sample that its parser refuses unchanged would make every case typed."""
    (tmp_path / "file").write_text("1")
    with pytest.raises(BadHeader):
        run("some", Parser(lambda directory: [tmp_path / "file"], raising), range(3), seed=0)


def test_warnings_of_a_parser_are_hidden(caplog):
    """A library's warning may repeat a lone surrogate, which no report of a test could be sent with."""

    def parse(path: Path) -> None:
        logging.getLogger("a.library").warning("unknown value \ud800")
        warnings.warn("unknown value", stacklevel=1)

    def make(directory: Path) -> list[Path]:
        (directory / "file").write_text("0")
        return [directory / "file"]

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert run("some", Parser(make, parse), range(3), seed=0).accepted == 3
    assert (caplog.text, seen) == ("", [])


def test_mutations_depend_on_the_seed_alone():
    """Equal seeds give equal files, other seeds other ones, and the original stays as it is."""
    value = {"a": [1, 2.5, {"b": "text"}], "c": None, "d": True}
    before = json.dumps(value)
    texts = [mutate_json(value, Random(i)) for i in range(200)]
    assert texts == [mutate_json(value, Random(i)) for i in range(200)]
    assert len(set(texts)) > 150
    assert json.dumps(value) == before
    raw = samples.gguf_model()[2][:64] + bytes(range(64))
    assert mutate_bytes(raw, Random(3)) == mutate_bytes(raw, Random(3))
    assert len({mutate_bytes(raw, Random(i)) for i in range(50)}) > 40


def test_mutations_of_every_kind_occur():
    """NaN, infinity, deep nesting, long digits, control characters, missing, long and doubled keys are all written."""
    value = {"a": 1, "b": [1, 2], "c": {"d": "text"}}
    texts = [mutate_json(value, Random(i)) for i in range(3000)]
    for part in (b"NaN", b"Infinity", b"[" * 1000, b"9" * 1000, b"\\u001b", b"\\ud800", b"a" * 300, b"-1"):
        assert any(part in text for text in texts), part
    assert any(b'"a"' not in text for text in texts)
    assert any(text.count(b'"a":') > 1 for text in texts)


def test_the_command_prints_a_table_or_json(capsys):
    """One row a parser; a case runs again by its number."""
    assert main(["--parser", "config.json", "--cases", "3", "--first", "7"]) == 0
    out = capsys.readouterr().out
    assert "| config.json | 3 |" in out
    assert main(["--parser", "config.json", "--cases", "3", "--json"]) == 0
    assert Outcome(**json.loads(capsys.readouterr().out)).cases == 3
