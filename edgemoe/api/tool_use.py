"""Tools of a chat: the functions that the model may call, and how its chat template writes calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from edgemoe.api.answer_form import AnswerForm
from edgemoe.api.answer_reader import Call
from edgemoe.api.template import Message, render_chat
from edgemoe.errors import UserError
from edgemoe.grammar.lark import CallForm, Reasoning, Words, calls_answer, led_text_or_call, text_and_calls
from edgemoe.grammar.schema import refused
from edgemoe.storage.files.untrusted import foreign_code

AUTO, REQUIRED = "auto", "required"
"""Choices of a tool that are no name: text or calls; at least one call."""

_NAMES = ("edgemoe_first", "edgemoe_second")
_ARGUMENTS = ({"place": "here"}, {"place": "there"})
_IDS = ("1a2b3c4d5", "6f7a8b9c0")
"""Not random: ids with the same last digits would seem to be text that the template writes for every call. Nine letters
and digits are taken by every template."""


@dataclass(frozen=True)
class ToolUse:
    """Tools that an answer may call.

    Args:
        tools: {"type": "function", "function": {"name", "description", "parameters", "strict"}}, as the chat template
            gets them.
        choice: AUTO, REQUIRED, or the name of the one that must be called.
        several: calls in one answer.
    """

    tools: Sequence[Mapping[str, Any]]
    choice: str = AUTO
    several: bool = True

    @property
    def enforced(self) -> bool:
        """Whether a grammar keeps the calls in form: a call is required, or a tool is strict."""
        return self.choice != AUTO or any(tool["function"].get("strict") for tool in self.tools)

    def grammar(self, words: Words, form: CallForm, reasoning: Reasoning | None) -> str:
        """The grammar of the answer.

        Raises:
            UserError: a part of a tool's parameters cannot be enforced, or it is unknown what opens a call within text.
        """
        named = [tool["function"] for tool in self.tools]
        if self.choice not in (AUTO, REQUIRED):
            named = [function for function in named if function["name"] == self.choice]
        called = [(function["name"], _parameters(function)) for function in named]
        if self.choice == AUTO:
            if reasoning and reasoning.lead:
                return led_text_or_call(words, form, called, reasoning)
            if not form.mark:
                found = "a response_template with a pattern there"
                raise UserError("one text that opens a call, for a strict tool", found, "require a call")
            return text_and_calls(words, form, called, several=self.several)
        several = self.several and self.choice == REQUIRED and not form.alone
        return calls_answer(words, form, called, reasoning, several=several)


def _parameters(function: Mapping[str, Any]) -> Mapping[str, object]:
    parameters = {"type": "object"} | (function.get("parameters") or {})
    if parameters["type"] != "object":
        found = f"{str(parameters['type'])[:60]!r} of {function['name']}"
        raise refused("parameters of type object", found, "change the tool")
    return parameters


def require_tools(tokenizer: Any, form: AnswerForm | None, variables: Mapping[str, object]) -> AnswerForm:
    """Returns the form by which calls are found in answers.

    Raises:
        UserError: there is none, or the chat template writes no tools and the form needs it to.
    """
    wanted = "a model whose calls of tools can be found in its answers"
    if form is None or not form.reads_calls:
        found = (
            "no response_template that works in tokenizer_config.json, and a chat template of no known form"
        )
        raise UserError(wanted, found, "leave tools out, or add a response_template")
    if not form.knows_tools and not writes_tools(tokenizer, variables):
        raise UserError(wanted, "a chat template that leaves tools out", "choose another model")
    return form


def writes_tools(tokenizer: Any, variables: Mapping[str, object]) -> bool:
    """Whether the chat template writes the tools that it gets."""
    tools = [_sample_tool(name) for name in _NAMES]
    written = render_chat(tokenizer, [_QUESTION], {**variables, "tools": tools})
    return all(name in written for name in _NAMES)


def described(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools, each with a description: gpt-oss's template joins it with text."""
    return [{**tool, "function": {"description": "", **tool["function"]}} for tool in tools]


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A conversation whose system message lists the tools, for a template that leaves them out."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = f"# Tools\n\n## functions\n\nYou may call these functions, in your own form of calls:\n\n{listed}"
    first = messages[0] if messages and messages[0]["role"] == "system" else None
    if first is None:
        return [{"role": "system", "content": text}, *messages]
    own = first["content"]
    parts = [*own, {"type": "text", "text": f"\n\n{text}"}] if isinstance(own, list | tuple) else None
    return [{**first, "content": parts or f"{own}\n\n{text}"}, *messages[1:]]


_QUESTION = {"role": "user", "content": "x"}


def _sample_tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"place": {"type": "string", "description": "x"}}}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


def call_form(
    tokenizer: Any, form: AnswerForm, variables: Mapping[str, object], ends: Sequence[str]
) -> CallForm:
    """How the chat template writes calls, as it writes an answer with two of them.

    Args:
        tokenizer: the tokenizer of the model.
        form: finds the parts of its answers, and must find the calls.
        variables: the variables of the template.
        ends: texts of the tokens that end an answer.

    Raises:
        UserError: it writes their arguments otherwise than as JSON, or in another form than `form` reads.
    """
    if form.calls:
        return form.calls
    calls = [Call(*sample) for sample in zip(_NAMES, _ARGUMENTS, _IDS, strict=True)]
    more = {**variables, "tools": [_sample_tool(name) for name in _NAMES]}
    answer = {"role": "assistant", "content": None, "tool_calls": [call.as_message() for call in calls]}
    prompt = render_chat(tokenizer, [_QUESTION], more)
    with foreign_code("a tokenizer with added tokens"):
        tokens = _Tokens(tokenizer.get_added_vocab())
    text = render_chat(tokenizer, [_QUESTION, answer], more, to_answer=False)
    found = _form_in(text, prompt, form, ends, tokens)
    if found and _reads_calls(found, form, prompt, calls):
        return found
    raise UserError(
        "a chat template that writes the arguments of a call as JSON, where calls are enforced",
        "this model's, which writes them in another form",
        "use tool_choice auto, without strict",
    )


def _reads_calls(writing: CallForm, form: AnswerForm, prompt: str, calls: Sequence[Call]) -> bool:
    """Whether `form` finds two sample calls where they are written as `writing`, which has none of their ids."""
    if any(call.id in part for call in calls for part in (writing.begin, writing.end, writing.between)):
        return False
    first, second = (_written(writing, call) for call in calls)
    reader = form.reader(prompt, [_sample_tool(call.name) for call in calls])
    if form.begins_in_reasoning(prompt) and form.reasoning:
        reader.feed(form.reasoning[1])
    reader.read(writing.before + first + writing.between + second + writing.after)
    return [(call.name, call.arguments) for call in reader.calls] == [(c.name, c.arguments) for c in calls]


def _written(form: CallForm, call: Call) -> str:
    return f"{form.begin}{call.name}{form.middle}{json.dumps(call.arguments)}{form.end}"


class _Tokens:
    """Cuts texts into added tokens and characters."""

    def __init__(self, added: Iterable[str]) -> None:
        words = sorted(map(re.escape, added), key=len, reverse=True)
        self._parts = re.compile("|".join([*words, "."]), re.DOTALL)

    def common_begin(self, one: str, other: str) -> str:
        """The longest text that both begin with, whole tokens."""
        return _common(self._parts.findall(one), self._parts.findall(other))

    def common_end(self, one: str, other: str) -> str:
        """The longest text that both end with, whole tokens."""
        first, second = self._parts.findall(one), self._parts.findall(other)
        return one[len(one) - len(_common(first[::-1], second[::-1])) :]


def _common(one: Sequence[str], other: Sequence[str]) -> str:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(part for part, _ in pairs)


def _form_in(
    text: str, prompt: str, form: AnswerForm, ends: Sequence[str], tokens: _Tokens
) -> CallForm | None:
    """The form of the two sample calls in a text; None: their arguments are no JSON there."""
    places = []
    at = 0
    for name, arguments in zip(_NAMES, _ARGUMENTS, strict=True):
        written = json.dumps(arguments)
        start = text.find(written, at)
        named = text.rfind(name, at, max(start, at))
        if start < 0 or named < 0:
            return None
        places.append((named, named + len(name), start, at := start + len(written)))
    (name1, middle1, json1, end1), (name2, middle2, json2, end2) = places
    lead, between, tail = text[:name1], text[end1:name2], text[end2:]
    tail = tail[: min((i for end in ends if (i := tail.find(end)) >= 0), default=len(tail))]
    begin = tokens.common_end(lead, between).lstrip()
    end = tokens.common_begin(between.removesuffix(begin), tail)
    if not begin or text[middle1:json1] != text[middle2:json2]:
        return None
    before = lead.removesuffix(begin)
    before = before[len(prompt) :] if before.startswith(prompt) else ""
    if form.reasoning:
        before = before.rpartition(form.reasoning[1])[2]
    before, after = before.lstrip(), tail[len(end) :].rstrip()
    mark = form.mark if form.mark and (before + begin).startswith(form.mark) else ""
    return CallForm(
        begin, text[middle1:json1], end, before, between.removesuffix(begin)[len(end) :], after, mark
    )


def reasoning_of(form: AnswerForm | None, prompt: str) -> Reasoning | None:
    """The reasoning that may come after a prompt, before an answer of a wanted form; None: none."""
    if form is None or form.reasoning is None:
        return None
    opening, closing = form.reasoning
    if prompt.rstrip().endswith(closing):
        return None
    begun = form.begins_in_reasoning(prompt)
    return Reasoning(opening, closing, begun, form.after_reasoning, form.lead)
