"""Turns as lines: quotes, ends of input, and binary input."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.console.input import PlainTurns, Turn, as_turn, is_open
from edgemoe.console.printable import printable
from edgemoe.errors import UserError


def turns(text: str) -> list[Turn]:
    """Reads every turn of a text."""
    source, found = PlainTurns(io.StringIO(text), None), []
    while True:
        try:
            found.append(source.read())
        except EOFError:
            return found


def test_lines_and_quoted_lines_are_turns():
    """Quotes at the ends of lines enclose one turn, which is no command."""
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


def test_a_backslash_continues_a_turn():
    """A turn goes on after each line that ends in a backslash; in quotes, and at the end of the input, one stays."""
    text = 'one \\\ntwo\\\nthree\na\\b\n"""in\\\nquotes"""\nlast\\\n'
    expected = ["one \ntwo\nthree", "a\\b", "in\\\nquotes", "last\\"]
    assert [turn.text for turn in turns(text)] == expected


def test_unclosed_quotes_and_binary_input_are_refused():
    """Both give a UserError."""
    with pytest.raises(UserError, match="end of the input inside the turn"):
        turns('"""half\na turn\n')
    with pytest.raises(UserError, match="lines of utf-8 text"):
        PlainTurns(io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"), None).read()


def test_prompts_go_to_their_stream():
    """One prompt begins a turn, another its further lines."""
    prompts = io.StringIO()
    source = PlainTurns(io.StringIO('a\n"""b\nc"""\n'), prompts)
    assert [source.read().text, source.read().text] == ["a", "b\nc"]
    assert prompts.getvalue() == "> > ... "


@pytest.mark.e2e
@given(st.text())
def test_any_text_is_open_or_a_turn(text):
    """A quoted text is unchanged, and every printable character reaches the terminal."""
    if is_open(text):
        assert text.strip().startswith('"""') or text.endswith("\\")
    else:
        assert as_turn(text).text in (text if as_turn(text).quoted else text.replace("\\\n", "\n"))
    shown = printable(text)
    assert "\x1b" not in shown
    assert [c for c in text if c.isprintable()] == [c for c in shown if c.isprintable()]
