"""Grammars of calls: begin, name, arguments and end as the chat template writes them, special tokens by id."""

from __future__ import annotations

import pytest
from scripted import END, chatml_tokenizer

from edgemoe.api.built_in_forms import BUILT_IN
from edgemoe.grammar.lark import (
    CallForm,
    Reasoning,
    calls_answer,
    formed_answer,
    led_text_or_call,
    text_and_calls,
)

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
    """Whether a grammar allows every token of an answer, and an end after it."""
    matcher = Matcher(Grammar(words, text))
    for token in [*tokenizer(answer, add_special_tokens=False)["input_ids"], END]:
        if not matcher.allowed()[token]:
            return False
        matcher.take(token)
    return True


@pytest.mark.e2e
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


CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
HARMONY = next(form for form in BUILT_IN if form.lead)
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
TO = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}'


@pytest.fixture(scope="module")
def in_channels():
    """A tokenizer with gpt-oss's special tokens, and its vocabulary."""
    tokenizer = chatml_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(CHANNELS)})
    return Vocabulary(tokenizer, 300, frozenset({END})), tokenizer


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("answer", "form", "either", "call"),
    [
        (f'{FINAL}{{"city": "Oslo"}}', True, True, False),
        (f'{ANALYSIS}{FINAL}{{"city": "Oslo"}}', True, True, False),
        ('{"city": "Oslo"}', False, False, False),
        (f"{ANALYSIS}{FINAL}It is sunny.", False, True, False),
        (f"{ANALYSIS}{TO}", False, True, True),
        (TO, False, True, True),
        (TO.replace("Oslo", 'O"'), False, False, False),
        (f"{TO}{TO}", False, False, False),
        ("It is sunny.", False, False, False),
    ],
)
def test_answers_in_channels(in_channels, answer, form, either, call):
    """A form, text or a call, and a call that is required: each in its channel, after reasoning or without."""
    thought = Reasoning(*HARMONY.reasoning, after=HARMONY.after_reasoning, lead=HARMONY.lead)
    words, _ = in_channels
    assert follows(*in_channels, formed_answer(words, CITY, thought), answer) == form
    tools = TOOLS[:1]
    assert follows(*in_channels, led_text_or_call(words, HARMONY.calls, tools, thought), answer) == either
    assert (
        follows(*in_channels, calls_answer(words, HARMONY.calls, tools, thought, several=False), answer)
        == call
    )


LISTED = next(form.calls for form in BUILT_IN if form.marks == ("[TOOL_CALLS]", "[/INST]"))
ITEM = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.e2e
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("answer", "want"),
    [
        (f"[TOOL_CALLS][{ITEM}]", True),
        (f"Well. [TOOL_CALLS][{ITEM}, {ITEM}]", True),
        ("It is sunny.", True),
        (f"[TOOL_CALLS][{ITEM.replace('Oslo', 'O')}", False),
        (f"[TOOL_CALLS]{ITEM}", False),
    ],
)
def test_calls_in_one_list(special, answer, want):
    """As Mistral's and Granite's: text, then all calls together."""
    tokenizer = chatml_tokenizer()
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    words = Vocabulary(tokenizer, 300, frozenset({END}))
    text = text_and_calls(words, LISTED, TOOLS[:1], several=True)
    assert follows(words, tokenizer, text, answer) == want


@pytest.mark.e2e
def test_calls_without_special_tokens(words, tokenizer):
    """Texts around and between calls; quotes in them are no grammar."""
    text = calls_answer(words, PLAIN, TOOLS[:1])
    for answer, want in (
        ('«[call "weather": {"city": "O"}]»', True),
        ('[call "weather": {"city": "O"}]', False),
    ):
        assert follows(words, tokenizer, text, answer) == want


@pytest.mark.e2e
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
    """Text is free; the tag opens a call."""
    assert follows(words, tokenizer, text_and_calls(words, TAGGED, TOOLS), answer) == want
    once = text_and_calls(words, TAGGED, TOOLS, several=False)
    assert follows(words, tokenizer, once, answer) == (want and answer.count(CALL) < 2)


@pytest.mark.e2e
def test_text_with_calls_that_a_text_opens(words, tokenizer):
    """A mark of several ordinary tokens."""
    text = text_and_calls(words, PLAIN, TOOLS[:1])
    for answer, want in (
        ('so [call "weather": {"city": "O"}] is', True),
        ("so [call me", False),
        ("[c", True),
    ):
        assert follows(words, tokenizer, text, answer) == want


@pytest.mark.e2e
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
            follows(words, tokenizer, formed_answer(words, {"type": "object"}, thought), answer)
            for thought in (Reasoning("<think>", close, begun=True), Reasoning("<think>", close))
        ]
        assert found == want
