"""Answers that are one of some texts, or what a regular expression matches: as Python's re judges the same texts."""

from __future__ import annotations

import re

import pytest
from scripted import END, chatml_tokenizer

from edgemoe.errors import UserError
from edgemoe.grammar.lark import Reasoning, TextForm, formed_answer
from edgemoe.grammar.schema import MOST_BYTES

pytest.importorskip("llguidance")

from edgemoe.grammar.matcher import Grammar, Matcher, Vocabulary

THOUGHT = Reasoning("<think>", "</think>")
TEXTS = ["yes", "no", "yes, please", 'a "b"\n\\c/', "é\u2028"]


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    return Vocabulary(chatml_tokenizer(), 300, frozenset({END}))


def follows(words: Vocabulary, form: TextForm, text: str, reasoning: Reasoning | None = None) -> bool:
    """Whether every token of a text, and an end after it, is allowed."""
    matcher = Matcher(Grammar(words, formed_answer(words, form, reasoning)))
    for token in [*chatml_tokenizer()(text, add_special_tokens=False)["input_ids"], END]:
        if not matcher.allowed()[token]:
            return False
        matcher.take(token)
    return True


@pytest.mark.e2e
def test_an_answer_is_one_of_the_texts(words):
    """Whatever characters they have, and also after reasoning; no part of one, and nothing more."""
    for text in TEXTS:
        assert follows(words, TextForm(tuple(TEXTS)), text)
    assert follows(words, TextForm(("yes",)), "<think>Hm.</think>\n\nyes", THOUGHT)
    for wrong in ("", "ye", "yesno", "Yes"):
        assert not follows(words, TextForm(tuple(TEXTS)), wrong)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"\d{2}/\d{2}", ["12/34", "1/34", "12/345"]),
        (r"(a|b)+\/\\c", ["ab/\\c", "/\\c", "ab\\/\\c"]),
        ("^a\nb$", ["a\nb", "ab"]),
        ('a\\\nb|[/#"]+ ?', ["a\nb", "a\\\nb", '/#" ', "/  "]),
    ],
)
def test_an_answer_is_what_a_pattern_matches(words, pattern, texts):
    """The whole answer; a pattern's slashes and line breaks stand for themselves, and add no rules to the grammar."""
    for text in texts:
        assert follows(words, TextForm(pattern=pattern), text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.e2e
@pytest.mark.parametrize(
    "form",
    [
        *(TextForm(pattern=pattern) for pattern in ("(a", "(?=a)a", "a\\")),
        TextForm(pattern="a" * (MOST_BYTES + 1)),
        TextForm(("a" * MOST_BYTES, "b")),
    ],
)
def test_what_cannot_be_enforced_is_refused(words, form):
    """Broken patterns, lookaround, and more than the bytes of a schema."""
    with pytest.raises(UserError, match="expected"):
        Grammar(words, formed_answer(words, form))
