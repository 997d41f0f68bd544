"""Answers as each family's chat template writes them: read back whole and as they come, closed, and enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest
from family_templates import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import chatml_tokenizer

from edgemoe.api.answer_form import AnswerForm
from edgemoe.api.python_calls import MOST_CHARACTERS, read_calls, write_calls
from edgemoe.api.template import render_chat
from edgemoe.api.thinking import ReasoningTags
from edgemoe.api.tool_use import call_form
from edgemoe.errors import UserError

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("get_weather", "tides")
]
QUESTION = {"role": "user", "content": "Oslo?"}
CALLS = [
    ("get_weather", {"city": 'New "York"\nby night', "days": 3}),
    ("tides", {"city": "Oslo", "more": {"near": "the fjord", "all": True}}),
    ("tides", {}),
]


def tokenizer_of(name: str) -> Any:
    tokenizer = chatml_tokenizer(FAMILIES[name].template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(FAMILIES[name].special)})
    return tokenizer


def answer_of(
    name: str, *, thought: str = "hm", text: str = "Let me see.", count: int = 3
) -> tuple[str, str]:
    """A prompt, and the text of an answer as the family's template writes it after the prompt."""
    message = {"role": "assistant", "content": text, "reasoning_content": thought}
    message["tool_calls"] = [
        {"id": f"call_{i}", "type": "function", "function": {"name": function, "arguments": arguments}}
        for i, (function, arguments) in enumerate(CALLS[:count])
    ]
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    prompt = render_chat(tokenizer, [QUESTION], {"tools": TOOLS})
    whole = render_chat(tokenizer, [QUESTION, message], {"tools": TOOLS})
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :].partition(family.end)[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_is_read_as_the_template_writes_it(name):
    """Reasoning, text and calls, in one piece and character by character; also text alone."""
    family, form = FAMILIES[name], AnswerForm.of(tokenizer_of(name))
    reasons, own_text = family.closing is not None and name != "lfm2", name != "gpt_oss"
    count = 3 if family.several else 1
    prompt, answer = answer_of(name, count=count)
    for pieces in ([answer], list(answer)):
        reader = form.reader(prompt, TOOLS)
        deltas = [delta for piece in pieces for delta in reader.feed(piece)] + reader.end()
        # gpt-oss's template has one place for reasoning and for text before a call
        thought = "hm" if own_text else "hm\nLet me see."
        assert reader.texts.get("reasoning_content") == (thought if reasons else None), answer
        assert reader.texts.get("content") == ("Let me see." if own_text else None), answer
        assert [(call.name, call.arguments) for call in reader.calls] == CALLS[:count]
        assert [delta.call for delta in deltas if delta.call] == reader.calls
    prompt, answer = answer_of(name, count=0)
    reader = form.reader(prompt, TOOLS).read(answer)
    assert (reader.texts.get("content", "Let me see."), reader.calls) == ("Let me see.", [])


@pytest.mark.parametrize("name", FAMILIES)
def test_half_a_call_is_text(name):
    """As it was written, without a call."""
    prompt, answer = answer_of(name, count=1)
    form = AnswerForm.of(tokenizer_of(name))
    half = answer[: answer.rindex("York")]
    reader = form.reader(prompt, TOOLS).read(half)
    assert reader.calls == []
    assert half.endswith(reader.texts["content"][-6:])
    without = form.reader(prompt, None).read(answer)
    assert (without.calls, "get_weather" in without.texts["content"]) == ([], True)


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_is_closed_in_the_familys_words(name):
    """The text after which an answer goes on; the rest of such an answer is text."""
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    tags = ReasoningTags.of(tokenizer)
    if family.closing is None:
        assert not tags.known
        return
    prompt, _ = answer_of(name)
    found = tags.after(prompt)
    assert found.closing == family.closing
    begin = "" if found.begun else f"{found.open}\n"
    reader = AnswerForm.of(tokenizer).reader(prompt, TOOLS)
    reader.read(f"{begin}so long a thought{found.closing}{found.lead}Paris.")
    assert reader.texts == {"reasoning_content": "so long a thought", "content": "Paris."}


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_enforced_where_arguments_are_json(name):
    """An enforced call is read again; where arguments have another form it is refused."""
    family, tokenizer = FAMILIES[name], tokenizer_of(name)
    form = AnswerForm.of(tokenizer)
    if not family.enforced:
        with pytest.raises(UserError, match="arguments of a call as JSON"):
            call_form(tokenizer, form, {}, [family.end])
        return
    found = call_form(tokenizer, form, {}, [family.end])
    function, arguments = CALLS[0]
    call = f"{found.begin}{function}{found.middle}{json.dumps(arguments)}{found.end}"
    prompt, _ = answer_of(name)
    reader = form.reader(prompt, TOOLS)
    closed = form.reasoning[1] + form.after_reasoning if form.begins_in_reasoning(prompt) else ""
    reader.read(f"{closed}{found.before}{call}{found.after}{family.end}")
    assert [(each.name, each.arguments) for each in reader.calls] == [CALLS[0]]


def test_ids_of_kimis_calls_have_names_and_numbers():
    """All calls of a conversation are counted, and results refer to them."""
    said = [
        QUESTION,
        *(
            {
                "role": "assistant",
                "content": "x",
                "tool_calls": [{"id": each, "function": {"name": "f", "arguments": {}}}],
            }
            for each in ("call_a", "call_b")
        ),
        {"role": "tool", "tool_call_id": "call_b", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_c", "content": "late"},
    ]
    text = render_chat(tokenizer_of("kimi_k2"), said)
    assert "<|tool_call_begin|>functions.f:0<" in text
    assert "<|tool_call_begin|>functions.f:1<" in text
    assert "## Return of functions.f:1\nsunny" in text
    assert "## Return of call_c\nlate" in text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(), each, max_size=3),
    max_leaves=6,
)


@settings(max_examples=20)
@given(st.lists(st.dictionaries(st.sampled_from(["city", "days", "a_b"]), VALUES, max_size=3), max_size=3))
def test_python_calls_are_read_as_they_are_written(every):
    """Any JSON values, in any number of calls."""
    calls = [{"name": "tools.f", "arguments": arguments} for arguments in every]
    assert read_calls(write_calls(calls)) == calls


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('get-weather(city="Oslo")', "get-weather", {"city": "Oslo"}),
        ('mcp.a-b.c(max-days=3, from="a", to = "b")', "mcp.a-b.c", {"max-days": 3, "from": "a", "to": "b"}),
        (
            "f(a=true, b=[false, null], c={'d': null}, e=-1)",
            "f",
            {"a": True, "b": [False, None], "c": {"d": None}, "e": -1},
        ),
        ("3d-view(class='import x=true, y(z=null)')", "3d-view", {"class": "import x=true, y(z=null)"}),
        (r"""f(a="say \"true\" (b=1)", b='it\'s null')""", "f", {"a": 'say "true" (b=1)', "b": "it's null"}),
        ('f(a="""x "true" y=1""", _0=2)', "f", {"a": 'x "true" y=1', "_0": 2}),
    ],
)
def test_python_calls_with_other_names_and_words(text, name, arguments):
    """Names with hyphens, names that are Python's words, and JSON's words; strings stay as they are."""
    want = {"name": name, "arguments": arguments}
    assert read_calls(text) == [want]
    assert read_calls(f"[{text}, {text}]") == [want, want]
    assert read_calls(write_calls([want])) == [want]


@pytest.mark.parametrize(
    "text",
    [
        *("f(a==1)", "f(a #\n=1)", "f(a=1)(b=2)", "f(a='x", "f(a=true-x)", '"\\"' * 30_000),
        *("", "f", "[f]", "f(1)", "f(**x)", "f(a=b)", "f(a=print())", "f(a={1, 2})", "f(a=b'x')", "f(a=1j)"),
        *("f(a=1e999)", "f(a", "[f(a=1)", "f(a=1); g()", "(" * 500, "-" * 60_000 + "1", "\0"),
        f"f(a='{'x' * MOST_CHARACTERS}')",
    ],
    ids=lambda text: text[:12],
)
def test_text_that_is_no_python_call(text):
    """Nothing of it is run, and nothing of it raises."""
    assert read_calls(text) is None
