"""Fields that vLLM, SGLang, llama.cpp and others have next to OpenAI's: what they mean here, or with which value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgemoe.serve.errors import ApiError
from edgemoe.serve.request.bounds import parsed
from edgemoe.serve.request.fields import Fields
from edgemoe.serve.request.neutral import SAMPLERS, Neutral

_BOTH: Neutral = {
    **SAMPLERS,
    **dict.fromkeys(("chat_template", "documents", "truncate_prompt_tokens", "negative_prompt"), ()),
    **dict.fromkeys(("guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"), ()),
    **dict.fromkeys(("grammar", "ebnf", "regex", "structural_tag", "audio", "web_search_options"), ()),
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
    **dict.fromkeys(("guided_json", "json_schema", "structured_outputs"), ()),
    **{"add_special_tokens": (True,), "response_format": ({"type": "text"},)},
}
"""The same of completions."""


class Thinking(Fields):
    """Whether the model reasons, as GLM's and other interfaces have it."""

    type: str | None = None


class Reasoning(Fields):
    """How much the model reasons, as OpenRouter has it."""

    effort: str | None = None
    enabled: bool | None = None


class ReasoningFields(Fields):
    """Other names of the chat template's variables of reasoning."""

    enable_thinking: bool | None = None
    thinking: Thinking | bool | None = None
    reasoning: Reasoning | None = None

    def reasoning_variables(self) -> dict[str, object]:
        """Variables for the chat template."""
        given: dict[str, object] = {}
        if self.reasoning and self.reasoning.effort is not None:
            given["reasoning_effort"] = self.reasoning.effort
        kind = self.thinking.type if isinstance(self.thinking, Thinking) else self.thinking
        switches = (self.enable_thinking, self.reasoning.enabled if self.reasoning else None)
        on = next((each for each in switches if each is not None), None)
        if kind is not None and kind != "auto":
            on = kind not in ("disabled", False)
        return given if on is None else given | {"enable_thinking": on}


class SchemaFields(Fields):
    """Other names of a JSON schema that the answer is to have."""

    guided_json: dict[str, Any] | str | None = None
    json_schema: dict[str, Any] | str | None = None
    structured_outputs: dict[str, Any] | None = None

    def other_schema(self) -> tuple[str, dict[str, Any]] | None:
        """The field that has a schema, and the schema; None: none has.

        Raises:
            ApiError: it is no JSON object, or `structured_outputs` wants another form than JSON.
        """
        for name in ("guided_json", "json_schema"):
            if value := getattr(self, name):
                return name, _schema(name, value)
        name, wanted = "structured_outputs", self.structured_outputs or {}
        known = {kind: value for kind, value in wanted.items() if value}
        if other := sorted(known.keys() - {"json", "json_object"}):
            message = (
                f"expected json in structured_outputs, got {other[0][:60]!r}: this server cannot obey it"
            )
            raise ApiError(400, message, param=name, code="unsupported_parameter")
        if "json" in known:
            return name, _schema(name, known["json"])
        return (name, {"type": "object"}) if known else None


def _schema(name: str, value: Mapping[str, Any] | str) -> dict[str, Any]:
    try:
        schema = parsed(value.encode()) if isinstance(value, str) else value
    except (ApiError, UnicodeError):
        schema = None
    if not isinstance(schema, dict):
        message = f"expected a JSON schema in {name}, got {str(value)[:60]!r}: send an object"
        raise ApiError(400, message, param=name)
    return schema
