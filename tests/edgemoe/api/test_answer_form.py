"""Answers split into reasoning, text and calls, piece by piece, as transformers reads them whole."""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import CHATML, chatml_tokenizer
from transformers.utils.chat_parsing import parse_response

from edgemoe.api.answer_form import AnswerForm
from edgemoe.api.built_in_forms import CALLS_AS_JSON, CALLS_AS_TAGS
from edgemoe.errors import ModelRefused

PROMPT = "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TAGS = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}},
    }
]
PARTS = ["<think>", "</think>", CALL, "\n", " ", "text", "<tool", "é", '{"x"']


def read(form: AnswerForm, pieces: list[str], prompt: str = PROMPT, tools=TOOLS, limit=None):
    """A reader that has read all, and the deltas of it."""
    reader = form.reader(prompt, tools, limit)
    deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.end()
    texts: dict[str, str] = {}
    for delta in deltas:
        if delta.call is None:
            texts[delta.kind] = texts.get(delta.kind, "") + delta.text
    assert texts == reader.texts
    assert [delta.call for delta in deltas if delta.call] == reader.calls
    return reader


def called(reader) -> list[tuple[str, dict]]:
    return [(call.name, call.arguments) for call in reader.calls]


@given(parts=st.lists(st.sampled_from(PARTS), max_size=8), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_pieces_do_not_matter(parts, cuts):
    """However the text is cut, its parts are the same, and no word of it is lost."""
    form, text = AnswerForm(CALLS_AS_JSON), "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    one, many = read(form, [text]), read(form, pieces)
    assert (one.texts, called(one)) == (many.texts, called(many))
    found = "".join(one.texts.values())
    assert found.count("text") == text.count("text")
    assert len(one.calls) + found.count(CALL) == text.count(CALL)


@pytest.mark.parametrize(
    "text",
    ["Hello", f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}\n{CALL}", CALL, "<think>a</think>b"],
)
def test_a_whole_answer_is_read_as_transformers_reads_it(text):
    """Texts and calls; where it has one text of a kind."""
    want = parse_response(text, deepcopy(CALLS_AS_JSON), prefix=PROMPT, tools=TOOLS)
    reader = read(AnswerForm(CALLS_AS_JSON), list(text))
    assert reader.texts.get("reasoning_content") == want.get("reasoning_content")
    assert called(reader) == [tuple(call["function"].values()) for call in want.get("tool_calls", ())]
    if not reader.calls:
        assert reader.texts.get("content") == want.get("content")


def test_arguments_in_tags_get_the_types_of_their_tool():
    """A number for an integer."""
    reader = read(AnswerForm(CALLS_AS_TAGS), list(f"See:\n{TAGS}\n{TAGS.replace('1', 'a<b')}"))
    assert called(reader) == [("f", {"x": 1}), ("f", {"x": "a<b"})]
    assert reader.texts == {"content": "See:"}


@pytest.mark.parametrize(
    "half", [CALL[:-20], CALL.replace("}}", "}"), "<tool_call>\n[1]\n</tool_call>", "<tool_call>"]
)
def test_what_is_no_call_is_content_as_it_was_written(half):
    """Half a call at the end, broken JSON, another value: all of its text, in its place."""
    reader = read(AnswerForm(CALLS_AS_JSON), list(f"<think>a</think>b {CALL}\nc {half} d"))
    assert called(reader) == [("f", {"x": 1})]
    assert reader.texts["content"].split() == ["b", "c", *half.split(), "d"]


def test_without_tools_a_call_is_content():
    """Tags that a request has not wanted are text."""
    assert read(AnswerForm(CALLS_AS_JSON), [f"a {CALL}"], tools=None).texts == {"content": f"a {CALL}"}


def test_one_call_at_most():
    """After it nothing is read; the reader says that it is full."""
    reader = read(AnswerForm(CALLS_AS_JSON), [f"a {CALL}", f"\n{CALL} b"], limit=1)
    assert (called(reader), reader.texts, reader.full) == ([("f", {"x": 1})], {"content": "a"}, True)


def test_reasoning_that_the_prompt_has_begun():
    """The answer goes on with it; without the beginning of an answer in the prompt it begins anew."""
    form = AnswerForm(CALLS_AS_JSON)
    assert form.begins_in_reasoning(f"{PROMPT}<think>\n")
    assert not form.begins_in_reasoning(PROMPT)
    reader = read(form, ["hm</think>yes"], prompt=f"{PROMPT}<think>\n")
    assert reader.texts == {"reasoning_content": "hm", "content": "yes"}
    assert read(form, ["yes"], prompt="no anchor").texts == {"content": "yes"}
    assert read(form, ["hm</think>yes"], prompt="no anchor <think>").texts == reader.texts


def test_special_tokens_are_no_content():
    """Special tokens that end nothing are left out of texts."""
    form = AnswerForm(CALLS_AS_JSON, ["<|im_start|>"])
    assert read(form, ["a", "<|im_start|>", "b"]).texts == {"content": "ab"}


def test_the_form_of_a_tokenizer():
    """Its own response template first, else one of ours that the chat template writes, else none."""
    tokenizer = chatml_tokenizer()
    assert AnswerForm.of(tokenizer).mark == "<tool_call>"
    tokenizer.chat_template = CHATML.replace('{"name"', "<function=x><parameter=").replace("arguments", "x")
    assert AnswerForm.of(tokenizer).mark == ""
    tokenizer.chat_template = None
    assert AnswerForm.of(tokenizer) is None
    tokenizer.response_template = {
        "start_anchor": "A:",
        "fields": {"thinking": {"open": "(", "close": ")"}, "content": {}},
    }
    form = AnswerForm.of(tokenizer)
    assert (form.reasoning, form.reads_calls) == (("(", ")"), False)
    assert read(form, ["(a)b"], prompt="A:").texts == {"reasoning_content": "a", "content": "b"}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ({"fields": {}}, "non-empty"),
        ({"start_anchor": "a", "fields": {"content": {"open_pattern": "("}}}, "regex"),
        (
            {"start_anchor": "a", "fields": {"content": {"open_pattern": "(a|aa)+$b", "close": "c"}}},
            "of computing|more than 3 s",
        ),
        (["start_anchor"], "dict"),
    ],
)
def test_a_hostile_response_template_is_refused(template, reason):
    """A broken one, and one whose pattern takes for ever, in a process of its own."""
    tokenizer = chatml_tokenizer()
    tokenizer.response_template = template
    with pytest.raises(ModelRefused, match=reason):
        AnswerForm.of(tokenizer, cpu_seconds=1)


@pytest.mark.parametrize(
    ("family", "template", "limit"), [("qwen3-hermes", CALLS_AS_JSON, 30), ("qwen3-xml", CALLS_AS_TAGS, 40)]
)
def test_well_formed_answers_of_a_conformance_suite(family, template, limit):
    """canitoolcall's recorded and rendered answers, whole and by character: tags within arguments are their text."""
    data = Path(pytest.importorskip("canitoolcall").__file__).parent / "_data/fixtures" / family
    lines = [line for path in sorted(data.glob("*.jsonl")) for line in path.read_text("utf-8").splitlines()]
    cases = [case for case in map(json.loads, lines) if not {"malformed", "truncated"} & {*case["tags"]}]
    assert len(cases) >= limit
    form = AnswerForm(template, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
    for case in cases:
        wanted, text = case["expected"], case["raw_output"]
        for pieces in ([text], list(text)):
            reader = read(form, pieces, case.get("generation_prompt") or PROMPT, case.get("tools") or [])
            found = [{"name": call.name, "arguments": call.arguments} for call in reader.calls]
            calls = [
                {name: call[name] for name in ("name", "arguments")} for call in wanted["tool_calls"] or []
            ]
            assert found == calls, case["id"]
            for kind in ("content", "reasoning_content"):
                assert reader.texts.get(kind, "") == (wanted.get(kind) or "").strip(), case["id"]
