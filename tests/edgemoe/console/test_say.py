"""Lines for people on stderr."""

from __future__ import annotations

import io
import sys

import pytest

from edgemoe.console.width import say


class Terminal(io.StringIO):
    """A terminal that keeps what it was sent."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Says a text at a terminal of 30 columns; returns what it was sent."""
    monkeypatch.setenv("COLUMNS", "30")

    def show(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", screen := Terminal())
            say(*arguments)
        return screen.getvalue()

    return show


def test_lines_break_between_words_at_a_terminal(terminal):
    """A path stays whole, blank lines and the begin of a line stay, and a style does not count as text."""
    sent = terminal(f"  one two three four five six seven\n\nin /{'long-' * 8}\nend", "\x1b[2m")
    broken = "  one two three four five six\n  seven"
    assert sent == f"\x1b[2m{broken}\n\nin\n  /{'long-' * 8}\nend\x1b[0m\n"


def test_control_characters_are_left_out(terminal):
    """A name in a message cannot move the cursor."""
    assert terminal("a\x1b[31mb") == "a[31mb\n"


def test_elsewhere_a_line_is_a_line(capsys):
    """A script reads a message in one line."""
    say("word " * 60 + "end")
    assert capsys.readouterr().err == "word " * 60 + "end\n"
