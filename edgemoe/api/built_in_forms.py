"""Forms of answers by model family, for tokenizers that declare none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from edgemoe.api.response_templates import (
    CALLS_AS_JSON,
    CALLS_AS_TAGS,
    DEEPSEEK,
    DEEPSEEK_CALLS,
    DEEPSEEK_TAGS,
    ERNIE,
    GEMMA,
    GLM,
    HARMONY,
    KIMI,
    LFM,
    MINIMAX,
    MISTRAL_ARGUMENTS,
    THINKS,
    listed,
)
from edgemoe.grammar.lark import CallForm


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


def _in_list(mark: str, end: str = "") -> CallForm:
    """How calls of a JSON list are written."""
    return CallForm('{"name": "', '", "arguments": ', "}", f"{mark}[", ", ", f"]{end}", mark)


def _deepseek_calls(begin: str, middle: str, end: str) -> CallForm:
    begin, end = f"<｜tool▁call▁begin｜>{begin}", f"{end}<｜tool▁call▁end｜>"
    return CallForm(begin, middle, end, DEEPSEEK_CALLS, "\n", "<｜tool▁calls▁end｜>", DEEPSEEK_CALLS)


_MISTRAL, _GRANITE, _NEMOTRON = "[TOOL_CALLS]", "<|tool_call|>", "<TOOLCALL>"
_KIMI, _BRACKETS = "<|tool_calls_section_begin|>", ("[THINK]", "[/THINK]")

BUILT_IN = (
    BuiltInForm(
        ("<|start|>", "<|channel|>", "<|message|>"),
        HARMONY,
        reasoning=("<|channel|>analysis<|message|>", "<|end|>"),
        after_reasoning="<|start|>assistant",
        lead="<|channel|>final<|message|>",
        calls=CallForm(" to=functions.", "<|channel|>commentary json<|message|>", "", alone=True),
        knows_tools=True,
    ),
    BuiltInForm(("<｜Assistant｜>", "｜DSML｜"), DEEPSEEK_TAGS, knows_tools=True),
    BuiltInForm(
        ("<｜Assistant｜>", DEEPSEEK_CALLS, "```json"),
        DEEPSEEK,
        DEEPSEEK_CALLS,
        calls=_deepseek_calls("function<｜tool▁sep｜>", "\n```json\n", "\n```"),
        knows_tools=True,
    ),
    BuiltInForm(
        ("<｜Assistant｜>", DEEPSEEK_CALLS),
        DEEPSEEK,
        DEEPSEEK_CALLS,
        calls=_deepseek_calls("", "<｜tool▁sep｜>", ""),
        knows_tools=True,
    ),
    BuiltInForm(("<|assistant|>", "<tool_call>", "<arg_key>"), GLM),
    BuiltInForm(("<minimax:tool_call>",), MINIMAX),
    BuiltInForm(
        (_KIMI, "<|tool_call_argument_begin|>"),
        KIMI,
        _KIMI,
        calls=CallForm(
            "<|tool_call_begin|>functions.",
            ":0<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            before=_KIMI,
            after="<|tool_calls_section_end|>",
            mark=_KIMI,
            alone=True,
        ),
    ),
    BuiltInForm(("<|turn>", "<|tool_call>"), GEMMA, reasoning=("<|channel>thought", "<channel|>")),
    BuiltInForm(("<|im_start|>", "<|tool_call_start|>"), LFM),
    BuiltInForm((_MISTRAL, "[ARGS]", "[CALL_ID]"), MISTRAL_ARGUMENTS, reasoning=_BRACKETS),
    BuiltInForm(
        (_MISTRAL, "[ARGS]"),
        MISTRAL_ARGUMENTS,
        _MISTRAL,
        reasoning=_BRACKETS,
        calls=CallForm(_MISTRAL, "[ARGS]", "", mark=_MISTRAL),
    ),
    BuiltInForm(
        (_NEMOTRON,),
        listed(
            ["<SPECIAL_11>Assistant\n", "<|end_header_id|>\n\n"], _NEMOTRON, ["</TOOLCALL>", "<SPECIAL_12>"]
        ),
        _NEMOTRON,
        calls=_in_list(_NEMOTRON, "</TOOLCALL>"),
    ),
    BuiltInForm(
        (_MISTRAL, "[/INST]"),
        listed(["[/INST]", "[/TOOL_RESULTS]"], _MISTRAL, ["</s>"]),
        _MISTRAL,
        calls=_in_list(_MISTRAL),
    ),
    BuiltInForm(
        ("<|start_of_role|>", _GRANITE),
        listed("<|start_of_role|>assistant<|end_of_role|>", _GRANITE, ["<|end_of_text|>"]),
        _GRANITE,
        calls=_in_list(_GRANITE),
    ),
    BuiltInForm(("<|im_start|>", "<response>", "<tool_call>"), ERNIE, "<tool_call>"),
    BuiltInForm(("<|im_start|>", "<tool_call>", "<function=", "<parameter="), CALLS_AS_TAGS),
    BuiltInForm(("<|im_start|>", "<tool_call>", '"arguments"'), CALLS_AS_JSON, "<tool_call>"),
    BuiltInForm(("<think>",), THINKS),
    BuiltInForm(("</think>",), THINKS),
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
