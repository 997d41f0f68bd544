"""Calls in a chat template: whether it has tools, and how it writes them."""

from __future__ import annotations

from itertools import count
from typing import ClassVar

import pytest
from scripted import CHATML, chatml_tokenizer

from edgemoe.api.answer_form import AnswerForm
from edgemoe.api.tool_use import ToolUse, call_form, reasoning_of, require_tools
from edgemoe.errors import UserError
from edgemoe.grammar.lark import CallForm

ENDS = ["<|im_end|>"]

OUTER = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}[calls]{% for c in m.tool_calls %}[call]{{ c.function.name }} with \
{{ c.function.arguments | tojson }}[end]{% endfor %}[done]{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

OUTER_FORM = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\[calls\]\[call\](?P<name>\w+) with |\[call\](?P<name>\w+) with ",
            "close_pattern": r"\[end\](?:\[done\])?",
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            "repeats": True,
        },
        "content": {},
    },
}


def test_the_form_of_calls_in_tags():
    """Calls are found as Qwen 3 writes them; the template's treatment of reasoning is no part of the form."""
    tokenizer = chatml_tokenizer()
    form = require_tools(tokenizer, AnswerForm.of(tokenizer), {})
    for variables in ({}, {"enable_thinking": False}, {"thinking_begun": True}):
        found = call_form(tokenizer, form, variables, ENDS)
        assert (found.begin, found.middle, found.end) == (
            '<tool_call>\n{"name": "',
            '", "arguments": ',
            "}\n</tool_call>",
        )
        assert (found.before, found.between, found.after, found.mark) == ("", "\n", "", "<tool_call>")


def test_the_form_of_calls_within_a_frame():
    """Texts before all calls and after them belong to the form."""
    tokenizer = chatml_tokenizer(OUTER)
    found = call_form(tokenizer, AnswerForm(OUTER_FORM), {}, ENDS)
    assert (found.before + found.begin, found.middle) == ("[calls][call]", " with ")
    assert found.end + found.between + found.begin == "[end][call]"
    assert found.end + found.after == "[end][done]"


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("| tojson }}}", "}}}"),
        CHATML.replace("{{ call.function.arguments | tojson }}", "{}"),
        CHATML.replace('{"name": "', '{"id": "{{ call.id }}", "name": "'),
        CHATML.replace('"arguments": {{', '"parameters": {{'),
        CHATML.replace('"arguments": {{', '"x": "\\"arguments\\"", "arguments": {{').replace(
            "</tool_call>", "<end>"
        ),
    ],
    ids=["as python", "without arguments", "with an id", "another key", "another end"],
)
def test_other_forms_are_not_enforced(template, monkeypatch):
    """The answer's reader must find the calls that the template writes, with arguments as JSON; by no luck of ids."""
    numbers = count(10)
    monkeypatch.setattr("secrets.token_hex", lambda nbytes: f"{next(numbers)}0")
    tokenizer, form = chatml_tokenizer(template), AnswerForm.of(chatml_tokenizer())
    with pytest.raises(UserError, match="as JSON"):
        call_form(tokenizer, form, {}, ENDS)


def test_a_strict_tool_needs_a_text_that_opens_calls():
    """A pattern opens no grammar within free text; a required call needs none."""
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    written = CallForm("[call]", " with ", "[end]")
    assert ToolUse(tools).enforced
    with pytest.raises(UserError, match="opens a call"):
        ToolUse(tools).grammar(Plain(), written, None)
    assert "[call]f with " in ToolUse(tools, "required").grammar(Plain(), written, None)


class Plain:
    """A vocabulary without special tokens."""

    specials: ClassVar[dict[str, int]] = {}

    def is_end(self, token: int) -> bool:
        return False


def test_a_model_without_tools_is_named():
    """No form of calls, or a chat template that leaves tools out."""
    without = CHATML[CHATML.index("{%- for m in") :]
    tokenizer = chatml_tokenizer(without)
    with pytest.raises(UserError, match="leaves tools out"):
        require_tools(tokenizer, AnswerForm.of(tokenizer), {})
    tokenizer.chat_template = "{{ messages }}{{ tools }}"
    with pytest.raises(UserError, match="no response_template"):
        require_tools(tokenizer, AnswerForm.of(tokenizer), {})


def test_reasoning_before_an_answer_of_a_form():
    """It may come; the prompt has begun it; the prompt has ended it."""
    form = AnswerForm.of(chatml_tokenizer())
    assert not reasoning_of(form, "<|im_start|>assistant\n").begun
    assert reasoning_of(form, "<|im_start|>assistant\n<think>\n").begun
    assert reasoning_of(form, "<|im_start|>assistant\n<think>\n\n</think>\n\n") is None
    assert reasoning_of(None, "x") is None
