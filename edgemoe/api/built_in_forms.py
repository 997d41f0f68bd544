"""Forms of answers by model family, for tokenizers that declare none: response templates of transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgemoe.grammar.lark import CallForm

_THOUGHT = {"open": "<think>", "close": "</think>"}
_FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_NAME = r"(?P<name>[A-Za-z0-9_.-]{1,64})"


@dataclass(frozen=True)
class BuiltInForm:
    """The form in which a family's models answer.

    Args:
        marks: texts that the chat template has, or the tokenizer as added tokens.
        template: response template, in the form that transformers' ResponseParser reads: fields by name, each with its
            delimiters and the kind of its content.
        mark: the text that opens a call; "": it has no such text.
        reasoning: (open, close) texts of reasoning; None: the model has none.
        after_reasoning: text between reasoning and the rest of the answer.
        lead: text that opens the answer itself; "": nothing does.
        calls: how calls are written; None: as the chat template writes them.
        knows_tools: whether tools are put into the system message when the chat template leaves them out.
    """

    marks: tuple[str, ...]
    template: Mapping[str, Any]
    mark: str = ""
    reasoning: tuple[str, str] | None = ("<think>", "</think>")
    after_reasoning: str = ""
    lead: str = ""
    calls: CallForm | None = None
    knows_tools: bool = False


_CHATML = {"start_anchor": "<|im_start|>assistant\n"}
_TEXT = {"close": ["<|im_end|>", "<|endoftext|>"]}
_JSON_IN_TAGS = {
    "open": "<tool_call>",
    "close_pattern": r"(?<=[}\]])\s*</tool_call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
    "repeats": True,
}

_CHATML_FIELDS = {"reasoning_content": _THOUGHT, "tool_calls": _JSON_IN_TAGS, "content": _TEXT}

CALLS_AS_JSON = _CHATML | {"fields": _CHATML_FIELDS}
"""Response template of ChatML with calls as JSON between <tool_call> tags: Hermes, Qwen 2.5, 3 and 3 Next."""

_RESPONSE = {"open": "<response>", "close": "</response>"}

_ERNIE = _CHATML | {"fields": {**_CHATML_FIELDS, "response": _RESPONSE}}
"""Response template of ERNIE 4.5 that reasons: as the one before, with the text between tags too."""

_ARGUMENT = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))"
"""One argument between tags, which its own text may contain too."""

CALLS_AS_TAGS = _CHATML | {
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]{1,64})>",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {"tag_pattern": _ARGUMENT},
            "transform": _FUNCTION,
            "repeats": True,
        },
        "content": _TEXT,
    }
}
"""Response template of ChatML with a tag for each argument of a call: Qwen 3 Coder, Qwen 3.5."""

_GLM = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open_pattern": rf"<tool_call>\s*{_NAME}\s*(?=<arg_key>|</tool_call>)",
            "close_pattern": r"</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
                r"(?=\s*(?:<arg_key>|\Z))"
            },
            "transform": _FUNCTION,
            "repeats": True,
        },
        "content": {"close": ["<|user|>", "<|observation|>", "<|endoftext|>"]},
    },
}
"""Response template of GLM 4.5 to 4.7: a pair of tags for each argument."""

_DEEPSEEK_CALLS = "<｜tool▁calls▁begin｜>"

_DEEPSEEK = {
    "start_anchor": ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>"],
    "fields": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open_pattern": r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>\s*"
            rf"(?:function<｜tool▁sep｜>{_NAME}\s*```json\s|{_NAME}<｜tool▁sep｜>(?=\s*\{{))",
            "close_pattern": r"\s{0,8}(?:```\s{0,8})?<｜tool▁call▁end｜>",
            "content": "json",
            "transform": _FUNCTION,
            "repeats": True,
        },
        "content": {"close": ["<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>"]},
    },
}
"""Response template of DeepSeek V2.5, V3, R1 and V3.1, which writes calls without a code block."""

_TO = r"to=(?:functions\.)?" + _NAME
_MESSAGE = r"\s{0,4}(?:<\|constrain\|>)?\s{0,4}\w{0,32}\s{0,4}<\|message\|>"
"""Each pattern is searched again at every character, so that its repetitions have bounds."""

_BEGUN = r"(?:<\|start\|>assistant)?"
_ENDS = {"close": ["<|end|>", "<|return|>", "<|call|>"]}

_HARMONY = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {"open_pattern": _BEGUN + r"<\|channel\|>analysis ?<\|message\|>", **_ENDS},
        "tool_calls": {
            "open_pattern": rf"{_BEGUN} ?{_TO} ?<\|channel\|>(?:commentary|analysis){_MESSAGE}|"
            rf"{_BEGUN}<\|channel\|>(?:commentary|analysis) {_TO}{_MESSAGE}",
            **_ENDS,
            "content": "json",
            "transform": _FUNCTION,
            "repeats": True,
        },
        "response": {"open_pattern": rf"{_BEGUN}<\|channel\|>(?:final|commentary){_MESSAGE}", **_ENDS},
        "content": _ENDS,
    },
}
"""Response template of gpt-oss: messages in channels. Text to the user comes in `final`, or `commentary`."""


def _listed(anchor: object, mark: str, ends: list[str]) -> dict[str, Any]:
    """The response template of calls as one JSON list at the end of an answer."""
    calls = {"open": mark, "close": ends, "content": "json"}
    fields = {"reasoning_content": _THOUGHT, "tool_calls": calls, "content": {"close": ends}}
    return {"start_anchor": anchor, "fields": fields}


def _in_list(mark: str) -> CallForm:
    """How calls of a JSON list are written."""
    return CallForm('{"name": "', '", "arguments": ', "}", f"{mark}[", ", ", "]", mark)


_THINKS = {"start_anchor": "\0", "fields": {"reasoning_content": _THOUGHT, "content": {}}}
"""Response template of any model with tags of reasoning; its anchor stands in no prompt."""


def _deepseek_calls(begin: str, middle: str, end: str) -> CallForm:
    begin, end = f"<｜tool▁call▁begin｜>{begin}", f"{end}<｜tool▁call▁end｜>"
    return CallForm(begin, middle, end, _DEEPSEEK_CALLS, "\n", "<｜tool▁calls▁end｜>", _DEEPSEEK_CALLS)


_MISTRAL, _GRANITE = "[TOOL_CALLS]", "<|tool_call|>"

BUILT_IN = (
    BuiltInForm(
        ("<|start|>", "<|channel|>", "<|message|>"),
        _HARMONY,
        reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
        after_reasoning="<|start|>assistant",
        lead="<|channel|>final<|message|>",
        calls=CallForm(" to=functions.", "<|channel|>commentary json<|message|>", "", alone=True),
        knows_tools=True,
    ),
    BuiltInForm(
        ("<｜Assistant｜>", _DEEPSEEK_CALLS, "```json"),
        _DEEPSEEK,
        _DEEPSEEK_CALLS,
        calls=_deepseek_calls("function<｜tool▁sep｜>", "\n```json\n", "\n```"),
        knows_tools=True,
    ),
    BuiltInForm(
        ("<｜Assistant｜>", _DEEPSEEK_CALLS),
        _DEEPSEEK,
        _DEEPSEEK_CALLS,
        calls=_deepseek_calls("", "<｜tool▁sep｜>", ""),
        knows_tools=True,
    ),
    BuiltInForm(("<|assistant|>", "<tool_call>", "<arg_key>"), _GLM),
    BuiltInForm(
        (_MISTRAL, "[/INST]"),
        _listed(["[/INST]", "[/TOOL_RESULTS]"], _MISTRAL, ["</s>"]),
        _MISTRAL,
        calls=_in_list(_MISTRAL),
    ),
    BuiltInForm(
        ("<|start_of_role|>", _GRANITE),
        _listed("<|start_of_role|>assistant<|end_of_role|>", _GRANITE, ["<|end_of_text|>"]),
        _GRANITE,
        calls=_in_list(_GRANITE),
    ),
    BuiltInForm(("<|im_start|>", "<response>", "<tool_call>"), _ERNIE, "<tool_call>"),
    BuiltInForm(("<|im_start|>", "<tool_call>", "<function=", "<parameter="), CALLS_AS_TAGS),
    BuiltInForm(("<|im_start|>", "<tool_call>", '"arguments"'), CALLS_AS_JSON, "<tool_call>"),
    BuiltInForm(("<think>",), _THINKS),
    BuiltInForm(("</think>",), _THINKS),
)
"""The first one whose marks are all there is the model's; without one, answers are plain text."""


def built_in_form(template: str, tokens: Collection[str]) -> BuiltInForm | None:
    """The form of a model's answers; None: plain text.

    Args:
        template: the chat template.
        tokens: added tokens of the tokenizer.
    """

    def has(mark: str) -> bool:
        return mark in template or mark in tokens

    form = next((form for form in BUILT_IN if all(map(has, form.marks))), None)
    if form and form.reasoning and not any(map(has, form.reasoning)) and not form.lead:
        return replace(form, reasoning=None)
    return form
