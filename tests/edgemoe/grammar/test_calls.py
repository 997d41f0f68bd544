"""Grammars of calls: begin, name, arguments and end as the chat template writes them, special tokens by id."""

from __future__ import annotations

import pytest
from scripted import END, chatml_tokenizer

from edgemoe.grammar.lark import CallForm, Reasoning, calls_answer, json_answer, text_and_calls

pytest.importorskip("llguidance")

from edgemoe.grammar.matcher import Grammar, Matcher, Vocabulary

TAGGED = CallForm(
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n", mark="<tool_call>"
)
PLAIN = CallForm('[call "', '": ', "]", before="«", after="»", mark="[call")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [("weather", CITY), ('q"\\u', {"type": "object", "additionalProperties": False})]
THOUGHT = Reasoning("<think>", "</think>")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer():
    return chatml_tokenizer()


@pytest.fixture(scope="module")
def words(tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, 300, frozenset({END}))


def follows(words, tokenizer, text: str, answer: str) -> bool:
    """Whether a grammar allows every token of an answer, and an end behind it."""
    matcher = Matcher(Grammar(words, text))
    for token in [*tokenizer(answer, add_special_tokens=False)["input_ids"], END]:
        if not matcher.allowed()[token]:
            return False
        matcher.take(token)
    return True


@pytest.mark.parametrize(
    ("answer", "one", "several"),
    [
        (CALL, True, True),
        (f"{CALL}\n{CALL}", False, True),
        (f"<think>hm <b>\nyes</think>\n\n{CALL}", True, True),
        ("", False, False),
        ("It is sunny.", False, False),
        (f"Well. {CALL}", False, False),
        (CALL.replace("weather", "wether"), False, False),
        (CALL.replace("Oslo", 'Os"lo'), False, False),
        (CALL.replace('"Oslo"', "3"), False, False),
        (CALL.replace(": {", ":{"), False, False),
        (CALL.removesuffix("</tool_call>"), False, False),
        (CALL.replace("weather", 'q"\\u').replace('{"city": "Oslo"}', "{}"), True, True),
        ("<think>hm", False, False),
    ],
)
def test_required_calls(words, tokenizer, answer, one, several):
    """Reasoning may come first, then one call or several, and nothing else."""
    for most, want in ((False, one), (True, several)):
        text = calls_answer(words, TAGGED, TOOLS, THOUGHT, several=most)
        assert follows(words, tokenizer, text, answer) == want


def test_calls_without_special_tokens(words, tokenizer):
    """Texts around and between calls; quotes in them are no grammar."""
    text = calls_answer(words, PLAIN, TOOLS[:1])
    for answer, want in (
        ('«[call "weather": {"city": "O"}]»', True),
        ('[call "weather": {"city": "O"}]', False),
    ):
        assert follows(words, tokenizer, text, answer) == want


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ("It is sunny.", True),
        (f"<think>hm</think> Let me see.\n{CALL}\nThere.", True),
        (f"{CALL}\n{CALL}", True),
        (CALL.replace("weather", "wether"), False),
        (CALL.replace('"Oslo"', "3"), False),
        (f"{CALL} <tool_call>", False),
    ],
)
def test_text_with_calls_in_it(words, tokenizer, answer, want):
    """Text is free; what the tag opens is a call."""
    assert follows(words, tokenizer, text_and_calls(words, TAGGED, TOOLS), answer) == want
    once = text_and_calls(words, TAGGED, TOOLS, several=False)
    assert follows(words, tokenizer, once, answer) == (want and answer.count(CALL) < 2)


def test_text_with_calls_that_a_text_opens(words, tokenizer):
    """A mark of several ordinary tokens."""
    text = text_and_calls(words, PLAIN, TOOLS[:1])
    for answer, want in (
        ('so [call "weather": {"city": "O"}] is', True),
        ("so [call me", False),
        ("[c", True),
    ):
        assert follows(words, tokenizer, text, answer) == want


@pytest.mark.parametrize("close", ["</think>", "[/think]"])
def test_json_behind_reasoning(words, tokenizer, close):
    """Reasoning that the prompt has begun must end; otherwise it may be there. Tags may be tokens or text."""
    answers = {
        f"hm{close}\n\n{{}}": [True, False],
        f"<think>hm{close}{{}}": [False, True],
        "{}": [False, True],
    }
    for answer, want in answers.items():
        found = [
            follows(words, tokenizer, json_answer(words, {"type": "object"}, thought), answer)
            for thought in (Reasoning("<think>", close, begun=True), Reasoning("<think>", close))
        ]
        assert found == want
