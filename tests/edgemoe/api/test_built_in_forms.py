"""Answers of each family, as its models write them, and the tools that its chat template leaves out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from scripted import chatml_tokenizer

from edgemoe.api.answer_form import AnswerForm
from edgemoe.api.built_in_forms import BUILT_IN
from edgemoe.api.tool_use import call_form, described, reasoning_of, require_tools, with_tools
from edgemoe.errors import UserError

TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}}
]
ONE, TWO = ("f", {"x": 1}), ("g", {"y": "a b"})


@dataclass
class Family:
    """A family's chat template, in its own words for turns and calls, and an answer of its models.

    Args:
        template: jinja2 source.
        prompt: end of a prompt.
        answers: text -> (reasoning, text, calls), written by hand after the families' descriptions of their formats.
    """

    template: str
    prompt: str
    answers: dict[str, tuple[str, str, list[Any]]] = field(default_factory=dict)


TURNS = "{% for m in messages %}START{{ m.role }}\n{{ m.content }}{% endfor %}{{ tools }}"

FAMILIES = {
    "gpt_oss": Family(
        "<|start|>{{ messages[0].content }}<|channel|><|message|>",
        "<|start|>user<|message|>x<|end|><|start|>assistant",
        {
            "<|channel|>final<|message|>Paris.": ("", "Paris.", []),
            "<|channel|>analysis<|message|>Let me see": ("Let me see", "", []),
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}<|return|>": ("a\nb", "{}", []),
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>See:<|end|>"
            '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>': (
                "a",
                "See:",
                [ONE],
            ),
            ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}': ("", "", [ONE]),
            "<|channel|>commentary to=functions.f<|message|>{half": (
                "",
                "<|channel|>commentary to=functions.f<|message|>{half",
                [],
            ),
        },
    ),
    "glm4_moe": Family(
        "[gMASK]<sop><|assistant|><tool_call>{name}\n<arg_key>{{ tools }}",
        "<|user|>\nx<|assistant|>",
        {
            "\n<think>hm</think>\nParis.": ("hm", "Paris.", []),
            "\n<think></think>\nSee:\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
            "<tool_call>g<arg_key>y</arg_key><arg_value>a b</arg_value></tool_call>": (
                "",
                "See:",
                [ONE, TWO],
            ),
            "<tool_call>g\n</tool_call>": ("", "", [("g", {})]),
        },
    ),
    "deepseek_v3": Family(
        "<｜User｜>x<｜Assistant｜><｜tool▁calls▁begin｜>",
        "<｜User｜>x<｜Assistant｜><think>\n",
        {
            "hm\n</think>\n\nParis.": ("hm", "Paris.", []),
            'hm</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"x": 1}\n```'
            '<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"y": "a b"}<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>": ("hm", "", [ONE, TWO]),
        },
    ),
    "mixtral": Family(
        "[INST] x[/INST][AVAILABLE_TOOLS]{{ tools }}[TOOL_CALLS]",
        "<s>[INST] x[/INST]",
        {
            " Paris.": ("", "Paris.", []),
            '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "a1b2c3d4e"}, {"name": "g", "arguments": '
            '{"y": "a b"}}]</s>': ("", "", [ONE, TWO]),
        },
    ),
    "granitemoe": Family(
        "<|start_of_role|>assistant<|end_of_role|><|tool_call|>{{ tools }}",
        "<|start_of_role|>assistant<|end_of_role|>",
        {
            '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]<|end_of_text|>': ("", "", [ONE]),
            "Hi": ("", "Hi", []),
        },
    ),
    "ernie4_5_moe": Family(
        "<|im_start|>assistant\n<think>\n<response><tool_call>{{ tools }}",
        "<|im_start|>assistant\n<think>\n",
        {
            "hm\n</think>\n\n<response>\nParis.\n</response>\n": ("hm", "Paris.", []),
            'hm</think>\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>': ("hm", "", [ONE]),
        },
    ),
    "phimoe": Family(
        "<|user|>\nx<|end|>\n<|assistant|>\n{% if m.content.split('</think>') %}{% endif %}",
        "<|user|>\nx<|end|>\n<|assistant|>\n",
        {"<think>hm</think>Paris.": ("hm", "Paris.", []), "Paris.": ("", "Paris.", [])},
    ),
}


def form_of(name: str) -> AnswerForm:
    tokenizer = chatml_tokenizer(FAMILIES[name].template)
    form = AnswerForm.of(tokenizer)
    assert form is not None
    return form


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_of_a_family(name):
    """Reasoning, text and calls, in one piece and character by character."""
    form = form_of(name)
    for text, want in FAMILIES[name].answers.items():
        cuts = [0, len(text)], list(range(len(text) + 1))
        for cut in cuts:
            reader = form.reader(FAMILIES[name].prompt, TOOLS)
            for a, b in pairwise(cut):
                reader.feed(text[a:b])
            reader.end()
            texts = reader.texts.get("reasoning_content", ""), reader.texts.get("content", "")
            assert (*texts, [(call.name, call.arguments) for call in reader.calls]) == want, text


def test_a_template_without_marks_has_plain_text():
    """Answers of such a model are text alone, unless its tokenizer has tags of reasoning."""
    tokenizer = chatml_tokenizer("{{ messages[0].content }}")
    assert AnswerForm.of(tokenizer).reasoning == ("<think>", "</think>")
    assert not AnswerForm.of(tokenizer).reads_calls
    vocabulary = {word: number for word, number in tokenizer.get_added_vocab().items() if "think" not in word}
    tokenizer.get_added_vocab = lambda: vocabulary
    assert AnswerForm.of(tokenizer) is None
    for name in ("mixtral", "granitemoe", "gpt_oss"):  # only the last one reasons, in a channel
        tokenizer.chat_template = FAMILIES[name].template
        assert (AnswerForm.of(tokenizer).reasoning is None) == (name != "gpt_oss")


def test_tools_that_a_template_leaves_out():
    """They come in the system message where the model knows its calls by itself; otherwise tools are refused."""
    tokenizer = chatml_tokenizer(FAMILIES["gpt_oss"].template)
    form = require_tools(tokenizer, AnswerForm.of(tokenizer), {})
    assert form.reads_calls
    user = {"role": "user", "content": "x"}
    system, last = with_tools([user], TOOLS)
    assert (system["role"], last) == ("system", user)
    assert '"name": "f"' in system["content"]
    assert described(TOOLS)[0]["function"] == {"description": ""} | TOOLS[0]["function"]
    merged = with_tools([{"role": "system", "content": "S"}, user], TOOLS)
    assert merged[0]["content"] == f"S\n\n{system['content']}"
    parts = [{"type": "text", "text": "S"}]
    merged = with_tools([{"role": "system", "content": parts}, user], TOOLS)
    assert merged[0]["content"] == [*parts, {"type": "text", "text": f"\n\n{system['content']}"}]
    tokenizer.chat_template = "[/INST][TOOL_CALLS]"
    with pytest.raises(UserError, match="leaves tools out"):
        require_tools(tokenizer, AnswerForm.of(tokenizer), {})


def test_reasoning_and_calls_of_channels():
    """A form or a call may be enforced after reasoning, each in its own channel."""
    form = form_of("gpt_oss")
    found = reasoning_of(form, FAMILIES["gpt_oss"].prompt)
    assert (found.open, found.close, found.begun) == ("<|channel|>analysis<|message|>", "<|end|>", False)
    assert (found.after, found.lead) == ("<|start|>assistant", "<|channel|>final<|message|>")
    assert call_form(chatml_tokenizer(), form, {}, []).alone


@pytest.mark.e2e
@pytest.mark.parametrize("form", BUILT_IN, ids=lambda form: form.marks[-1])
def test_odd_answers_take_linear_time(form):
    """Runs of whitespace and of begins of tags, outside of a call and within one."""
    calls = (
        "<tool_call>f<arg_key>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
        '<minimax:tool_call><invoke name="f">',
        '<｜DSML｜function_calls><｜DSML｜invoke name="f">',
        "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{",
        "<|tool_call>call:f{",
        "[TOOL_CALLS]f[ARGS]{",
        "<|tool_call_start|>",
        " to=functions.f<|channel|>commentary json<|message|>",
    )
    start = time.process_time()
    for text in (
        "".join((begin, run * 600)) for begin in ("", form.mark, *calls) for run in (" ", "\n", "<", "t", "`")
    ):
        AnswerForm(form.template, [], form).reader("", []).read(text)
    assert time.process_time() - start < 2
