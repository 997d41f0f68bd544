"""Fields that vLLM, SGLang, llama.cpp and others add to OpenAI's: their meaning here, or the one accepted value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgemoe.grammar.lark import Form, TextForm
from edgemoe.serve.errors import ApiError
from edgemoe.serve.request.bounds import parsed
from edgemoe.serve.request.fields import Fields
from edgemoe.serve.request.neutral import SAMPLERS, Neutral
from edgemoe.serve.request.thinking import Budget, Effort

_BOTH: Neutral = {
    **SAMPLERS,
    **dict.fromkeys(("chat_template", "documents", "truncate_prompt_tokens", "negative_prompt"), ()),
    **dict.fromkeys(("guided_grammar", "guided_whitespace_pattern", "grammar", "ebnf", "structural_tag"), ()),
    **dict.fromkeys(("audio", "web_search_options"), ()),
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (True,)),
    **{"modalities": (["text"],), "verbosity": ("medium",), "n_probs": (0,)},
}

CHATS: Neutral = {
    **_BOTH,
    **dict.fromkeys(("add_special_tokens", "echo", "continue_final_message"), (False,)),
    **dict.fromkeys(
        ("add_generation_prompt", "include_reasoning", "separate_reasoning", "parse_tool_calls"), (True,)
    ),
    "reasoning_format": ("auto", "deepseek"),
}
"""Fields of chats -> the values with which they change nothing."""

COMPLETIONS: Neutral = {
    **_BOTH,
    **dict.fromkeys(("guided_json", "json_schema", "guided_choice", "guided_regex", "regex"), ()),
    "structured_outputs": (),
    **{"add_special_tokens": (True,), "response_format": ({"type": "text"},)},
}
"""Field of completions -> accepted values."""


class Thinking(Fields):
    """Whether the model reasons, as GLM's and other interfaces have it."""

    type: str | None = None
    budget_tokens: Budget | None = None


class Reasoning(Fields):
    """How much the model reasons, as OpenRouter has it."""

    effort: Effort | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None


class ReasoningFields(Fields):
    """Other names of the chat template's variables of reasoning."""

    enable_thinking: bool | None = None
    thinking: Thinking | bool | None = None
    reasoning: Reasoning | None = None

    def reasoning_variables(self) -> dict[str, object]:
        """Variables for the chat template."""
        on = self.other_switch()
        return {} if on is None else {"enable_thinking": on}

    def other_effort(self) -> Effort | None:
        """The effort under its other name; None: there is none."""
        return self.reasoning.effort if self.reasoning else None

    def other_budget(self) -> int | None:
        """The budget under its other names, 0 where reasoning is turned off; None: there is none."""
        given = self.thinking.budget_tokens if isinstance(self.thinking, Thinking) else None
        if given is None and self.reasoning:
            given = self.reasoning.max_tokens
        return 0 if self.other_switch() is False else given

    def other_switch(self) -> bool | None:
        """Whether reasoning is turned on or off under its other names; None: the request says nothing of it."""
        kind = self.thinking.type if isinstance(self.thinking, Thinking) else self.thinking
        switches = (self.enable_thinking, self.reasoning.enabled if self.reasoning else None)
        on = next((each for each in switches if each is not None), None)
        if kind is not None and kind != "auto":
            on = kind not in ("disabled", False)
        return on


_FORMS = {
    **dict.fromkeys(("guided_json", "json_schema"), "json"),
    **dict.fromkeys(("guided_regex", "regex"), "regex"),
    "guided_choice": "choice",
}
"""Field -> the kind of form that it has."""

_KINDS = ("json", "json_object", "regex", "choice")
"""Kinds of forms in `structured_outputs`."""


class FormFields(Fields):
    """Other names of the form that the answer must have: a JSON schema, some texts, or a regular expression."""

    guided_json: dict[str, Any] | str | None = None
    json_schema: dict[str, Any] | str | None = None
    guided_choice: list[str] | None = None
    guided_regex: str | None = None
    regex: str | None = None
    structured_outputs: dict[str, Any] | None = None

    def other_form(self) -> tuple[str, Form] | None:
        """The field that has a form, and the form; None: none has.

        Raises:
            ApiError: it is none, there are several, or `structured_outputs` has another kind.
        """
        outputs = {kind: value for kind, value in (self.structured_outputs or {}).items() if value}
        if other := sorted(outputs.keys() - set(_KINDS)):
            wanted = ", ".join(_KINDS)
            message = (
                f"expected {wanted} in structured_outputs, got {other[0][:60]!r}: this server cannot obey it"
            )
            raise ApiError(400, message, param="structured_outputs", code="unsupported_parameter")
        given = [(name, kind, value) for name, kind in _FORMS.items() if (value := getattr(self, name))]
        given += [("structured_outputs", kind, outputs[kind]) for kind in _KINDS if kind in outputs]
        if len(given) > 1:
            message = (
                f"expected one form of the answer, got {given[0][0]} and {given[1][0]}: leave one of them out"
            )
            raise ApiError(400, message, param=given[1][0])
        return next(((name, _form(name, kind, value)) for name, kind, value in given), None)


def _form(name: str, kind: str, value: Any) -> Form:
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json":
        return _schema(name, value)
    texts, wanted = (value, "a list of texts") if kind == "choice" else ([value], "a regular expression")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"expected {wanted} in {name}, got {repr(value)[:60]}: send one", param=name)
    return TextForm(tuple(texts)) if kind == "choice" else TextForm(pattern=value)


def _schema(name: str, value: Mapping[str, Any] | str) -> dict[str, Any]:
    try:
        schema = parsed(value.encode()) if isinstance(value, str) else value
    except (ApiError, UnicodeError):
        schema = None
    if not isinstance(schema, dict):
        message = f"expected a JSON schema in {name}, got {str(value)[:60]!r}: send an object"
        raise ApiError(400, message, param=name)
    return schema
