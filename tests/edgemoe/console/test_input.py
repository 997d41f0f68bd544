"""Turns as lines: quotes, ends of input, and what is no text."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.chat.slash_commands import COMMANDS, COMPLETIONS
from edgemoe.console.input import PlainTurns, Turn, as_turn, is_open, printable
from storage.errors import UserError


def turns(text: str) -> list[Turn]:
    """All of a text's."""
    source, found = PlainTurns(io.StringIO(text), None), []
    while True:
        try:
            found.append(source.read())
        except EOFError:
            return found


def test_lines_and_quoted_lines_are_turns():
    """Quotes may begin and end anywhere on their lines' ends; what they hold is one turn and no command."""
    text = 'one\r\n\n"""two\nlines"""\n"""\nthree\n\n"""\n"""four"""\nfive """\n""""""\nlast'
    assert turns(text) == [
        Turn("one"),
        Turn(""),
        Turn("two\nlines", quoted=True),
        Turn("three\n", quoted=True),
        Turn("four", quoted=True),
        Turn('five """'),
        Turn("", quoted=True),
        Turn("last"),
    ]


def test_quotes_that_never_close_and_bytes_that_are_no_text_are_refused():
    """Both are the input's fault, and say so."""
    with pytest.raises(UserError, match="the input ends inside the turn"):
        turns('"""half\na turn\n')
    with pytest.raises(UserError, match="utf-8 text were wanted"):
        PlainTurns(io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"), None).read()


def test_prompts_go_where_they_are_asked_to():
    """One for a turn, another for its further lines."""
    prompts = io.StringIO()
    source = PlainTurns(io.StringIO('a\n"""b\nc"""\n'), prompts)
    assert [source.read().text, source.read().text] == ["a", "b\nc"]
    assert prompts.getvalue() == "> > ... "


@given(st.text())
def test_any_text_is_open_or_a_turn(text):
    """What is quoted comes out as it went in; nothing printable is lost on the way to a terminal."""
    if is_open(text):
        assert text.strip().startswith('"""')
    else:
        assert as_turn(text).text in text
    shown = printable(text)
    assert "\x1b" not in shown
    assert [c for c in text if c.isprintable()] == [c for c in shown if c.isprintable()]


def test_every_command_is_completed():
    """By name, with a slash."""
    assert set(COMPLETIONS) == {f"/{name}" for name in COMMANDS}
