"""A model's own strings at a real terminal: no control character of theirs arrives."""

from __future__ import annotations

import io
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from resealed_store import edit_manifest
from terminals import Terminal

from edgemoe.console.printable import printable

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08"


def test_control_characters_are_removed():
    """Control characters of 7 and of 8 bits, and DEL, go; newlines, tabs and every other character stay."""
    assert printable(f"a{HOSTILE}\x7f\x00\n\tö漢🙂") == "a]0;owned[2J31m\n\tö漢🙂"


def test_halves_of_surrogate_pairs_are_replaced():
    """JSON may hold a code that no terminal's encoding has."""
    assert printable("a\ud800b\udfff🙂") == "a?b?🙂"


def test_an_unprintable_format_is_printed(run, tmp_path, tiny_store):
    """inspect of a store whose source_format is half of a surrogate pair prints, with and without --json."""
    store = Path(shutil.copytree(tiny_store, tmp_path / "store"))
    edit_manifest(store, lambda manifest: replace(manifest, source_format="\ud800"))
    assert run("inspect", store)[0] == run("inspect", store, "--json")[0] == 0


def test_log_lines_of_every_library_are_filtered(run, tiny_store, capsys):
    """After the command line has started, a record of any logger has printable characters only."""
    assert run("inspect", tiny_store)[0] == 0
    log, stream = logging.getLogger("some.library"), io.StringIO()
    handler = logging.StreamHandler(stream)
    log.addHandler(handler)
    log.warning("value %s", HOSTILE)
    log.removeHandler(handler)
    assert "owned" in stream.getvalue()
    assert not any(c in stream.getvalue() for c in "\x1b\x9b\x07\x08")


COMMANDS = [
    (("inspect",), 0),
    (("verify",), 4),
    (("chat", "--prompt", "a", "--model"), 4),
    (("plan", "--model"), 4),
]
"""Command -> its exit code for a hostile store."""


@pytest.fixture
def hostile_store(tiny_store, tmp_path) -> Path:
    """A store whose format, matrices' names and path have control characters."""
    store = Path(shutil.copytree(tiny_store, tmp_path / f"store{HOSTILE}"))

    def hostile(manifest):
        geometry = manifest.geometry
        first, second = geometry.matrices
        matrices = (replace(first, name=f"gate{HOSTILE}"), second)
        return replace(manifest, source_format=HOSTILE, geometry=replace(geometry, matrices=matrices))

    edit_manifest(store, hostile)
    return store


def assert_harmless(text: str) -> None:
    """Names of the store are in the output, and no control character of theirs."""
    assert "owned" in text
    assert [each for each in ("\x1b]0", "\x1b[2J", "\x9b", "\x08") if each in text] == []


@pytest.mark.parametrize(("command", "code"), COMMANDS, ids=str)
def test_no_command_prints_a_models_escapes(run, hostile_store, command, code):
    """In results, errors and warnings."""
    exit_code, out, err = run(*command, hostile_store)
    assert exit_code == code
    assert_harmless(out + err)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("command", "code"),
    [pytest.param(*each, marks=() if "chat" in each[0] else pytest.mark.folders) for each in COMMANDS],
    ids=str,
)
def test_no_escape_arrives_at_a_terminal(hostile_store, tmp_path, command, code):
    """Also where the output goes to a terminal, with its own escape sequences."""
    terminal = Terminal(tmp_path, *command, hostile_store)
    shown = terminal.process.read()
    terminal.process.wait()
    assert terminal.process.exitstatus == code, shown
    assert_harmless(shown)
