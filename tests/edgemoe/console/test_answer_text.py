"""Answers at a terminal: word wrap, Markdown and reasoning, whatever the pieces are."""

from __future__ import annotations

import io
import re
import sys
from contextlib import redirect_stdout
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.console.answer_text import Look, Wrapped, import_renderers, open_text, split_blocks

WORDS = "the quick brown fox jumps over the lazy dog 你好 caf\u00e9 " * 3


class Screen(io.StringIO):
    """A terminal that keeps what it was sent."""

    def isatty(self):
        return True


def screen_of(text, columns):
    """Lines of a screen after text, left moves and erasures; a wide character takes two cells."""
    lines, cells = [[]], [0]
    for part in re.findall(r"\x1b\[(\d*)([A-Za-z])|(.|\n)", text):
        number, order, character = part
        if order == "D":
            for _ in range(int(number)):
                if not cells[-1]:
                    break
                last = lines[-1].pop()
                cells[-1] -= 2 if last in "你好" else 1
                assert last not in "你好"
        elif character == "\n":
            lines.append([])
            cells.append(0)
        elif character:
            lines[-1].append(character)
            cells[-1] += 2 if character in "你好" else 1
            assert cells[-1] < columns, text
    return ["".join(line) for line in lines]


def pieces_of(text, cuts):
    """A text in pieces."""
    at = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(at)]


@given(st.integers(12, 60), st.lists(st.integers(0, 1000)))
def test_lines_break_between_words(columns, cuts):
    """No word is cut, no line reaches the last column, and nothing else changes."""
    before, sys.stdout = sys.stdout, Screen()
    try:
        text = Wrapped(columns)
        for piece in pieces_of(WORDS, cuts):
            text.write(piece)
        sent = sys.stdout.getvalue()
    finally:
        sys.stdout = before
    lines = screen_of(sent, columns)
    assert " ".join(" ".join(lines).split()).replace("你 好", "你好") == " ".join(WORDS.split())
    assert len(lines) >= len(WORDS) // columns


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout a terminal of 40 columns, in the test itself; returns what it was sent."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def show(text, cuts=(), *, reasons=False, **look):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", screen := Screen())
            out = open_text(Look(**look), reasons=reasons)
            for piece in pieces_of(text, cuts):
                out.write(piece)
            out.close()
        return screen.getvalue()

    return show


@pytest.mark.parametrize("cuts", [(), range(100), (3, 11, 20, 33)])
def test_reasoning_is_dimmed(terminal, cuts):
    """Tags go, the reasoning is dim, and the answer is not; pieces may cut a tag."""
    sent = terminal("\n<think>\nHm. Let me <see>.\n</think>\n\nParis.", cuts)
    dim = "".join(re.findall(r"\x1b\[2m(.*?)\x1b\[0m", sent, re.DOTALL))
    assert dim.strip() == "Hm. Let me <see>."
    assert re.sub(r"\x1b\[2m.*?\x1b\[0m", "", sent, flags=re.DOTALL).strip() == "Paris."
    assert "think>" not in sent
    assert re.sub(r"\x1b\[[0-9]*m", "", sent).endswith(".\n\nParis.\n")


def test_reasoning_is_folded_and_shown(terminal, monkeypatch):
    """Folded it is one line with its words; shown it is as the model wrote it."""
    text = "<think>one two three</think>Yes."
    folded = terminal(text, range(40), reasoning="fold")
    assert folded.endswith("(thought: 3 words)\x1b[0m\nYes.\n")
    assert "two" not in folded
    assert terminal(text, reasoning="show") == f"{text}\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal(text) == "one two three\n\nYes.\n"


def test_a_prompt_may_have_opened_the_reasoning(terminal):
    """Then the answer has the closing tag alone; without one, all of it is reasoning."""
    assert (
        terminal("Hm.</think>Yes.", reasons=True).replace("\x1b[2m", "").replace("\x1b[0m", "")
        == "Hm.\n\nYes.\n"
    )
    assert "Hm" in terminal("Hm", reasons=True)


@pytest.mark.parametrize("markdown", [False, True])
def test_reasoning_that_is_cut_ends_its_line_alone(terminal, monkeypatch, markdown):
    """No blank line follows, as no answer does."""
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal("<think>one two", range(20), markdown=markdown) == "one two\n"
    folded = terminal("<think>one two", range(20), reasoning="fold", markdown=markdown)
    assert folded.endswith("(thought: 2 words)\x1b[0m\n")


def test_tags_within_an_answer_are_text(terminal):
    """A tag after other text is none, and a tag that stays unfinished is printed."""
    assert terminal("Write <think> here.", range(30)) == "Write <think> here.\n"
    assert terminal("<thi", range(10)) == "<thi\n"
    assert terminal("") == "\n"


def test_markdown_is_rendered_block_by_block(terminal):
    """Emphasis and lists have no marks left, code keeps its lines, and every block is there once."""
    text = "# Title\n\nSome **bold** words.\n\n- one\n- two\n\n```\na = 1\n\nb = 2\n```\n\nEnd."
    for cuts in ((), range(100)):
        sent = terminal(text, cuts, markdown=True)
        kept = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent)
        assert not re.search(r"\*\*|```|# Title", kept)
        final = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal(text, markdown=True))
        for words in ("Title", "Some bold words.", "• one", "a = 1", "b = 2", "End."):
            assert words in final


@given(st.text(alphabet="ab\n`-1. ", max_size=60))
def test_splitting_keeps_the_text(text):
    """Both parts together are the text, and a split comes after a blank line."""
    done, rest = split_blocks(text)
    assert done + rest == text
    assert not done or not done.splitlines()[-1].strip()


def test_a_pipe_gets_the_text_as_it_is(capsys):
    """Without a terminal nothing is wrapped, dimmed or rendered."""
    text = "<think>x</think>" + "long **word** " * 30
    out = open_text(Look(markdown=True, reasoning="fold"), reasons=False)
    out.write(text)
    out.close()
    assert capsys.readouterr().out == f"{text}\n"


def test_control_characters_are_left_out(terminal):
    """A model's own escape sequences do not reach the terminal."""
    assert terminal("a\x1b[31mb") == "a[31mb\n"


def test_what_wraps_lines_is_imported_before_a_model(monkeypatch):
    """Without Markdown too: import_renderers imports what the first word would."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delitem(sys.modules, "prompt_toolkit.utils", raising=False)
    with redirect_stdout(Screen()):
        import_renderers(Look(markdown=False))
    assert "prompt_toolkit.utils" in sys.modules
