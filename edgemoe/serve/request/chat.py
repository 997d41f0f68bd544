"""The answer to a conversation: the request that every protocol's chats become."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from edgemoe.serve.errors import ApiError
from edgemoe.serve.request import bounds
from edgemoe.serve.request.fields import Fields, Limit, Name, Whole
from edgemoe.serve.request.parts import Part
from edgemoe.serve.request.sampling import MOST_TOP
from edgemoe.serve.request.thinking import ThinkingFields

if TYPE_CHECKING:
    from edgemoe.api.choices import Choices
    from edgemoe.api.tool_use import ToolUse
    from edgemoe.grammar.lark import Form

MOST_TOOLS = 128
"""OpenAI's limit."""

_ROLES = {"developer": "system"}
"""OpenAI's newer names of roles -> names that chat templates have."""

_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"
"""The form of a function's name."""


class CalledFields(Fields):
    """The function of a call that a message repeats; `arguments` is a JSON object as text."""

    name: Name
    arguments: str | dict[str, Any] | None = None

    def parsed(self) -> dict[str, Any]:
        """The arguments, as chat templates take them.

        Raises:
            ApiError: they are no JSON object.
        """
        given = self.arguments or {}
        try:
            parsed = bounds.parsed(given.encode()) if isinstance(given, str) else given
        except (ApiError, UnicodeError):
            parsed = None
        if not isinstance(parsed, dict):
            message = f"expected a JSON object as arguments of the call of {self.name[:64]!r}, got {str(given)[:60]!r}"
            raise ApiError(400, f"{message}: send them as the server has written them", param="messages")
        return parsed


class CallFields(Fields):
    """A call that a message repeats."""

    id: Name | None = None
    function: CalledFields


class MessageFields(Fields):
    """A message of a conversation."""

    role: Name
    content: str | list[Part] | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallFields] | None = None
    tool_call_id: Name | None = None
    function_call: Any = None

    def as_message(self) -> dict[str, Any]:
        """The message that chat templates take.

        Raises:
            ApiError: a part that is neither text nor a picture, or a call that is none.
        """
        if self.function_call is not None or self.role == "function":
            message = "expected tool_calls and messages of role tool, got a function_call: see tools"
            raise ApiError(400, message, param="messages", code="unsupported_parameter")
        content: Any = None if self.tool_calls and self.content is None else self.content or ""
        if isinstance(content, list):
            parts = [part.as_part() for part in content]
            pictures = any(part["type"] != "text" for part in parts)
            content = parts if pictures else "\n".join(part["text"] for part in parts)
        given: dict[str, Any] = {"role": _ROLES.get(self.role, self.role), "content": content}
        for name in ("name", "reasoning_content", "reasoning", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                given[name] = value
        if self.tool_calls:
            given["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": f.name, "arguments": f.parsed()}}
                for call in self.tool_calls
                for f in [call.function]
            ]
        return given


def as_messages(fields: list[MessageFields]) -> list[dict[str, Any]]:
    """The messages that chat templates take; a tool's result gets the name of the tool that was called."""
    messages = [each.as_message() for each in fields]
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
        if call["id"] is not None
    }
    for message in messages:
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return messages


class FunctionFields(Fields):
    """A function that a model may call. Fields beyond these go to the chat template too."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(Fields):
    """A tool."""

    type: Literal["function"] = "function"
    function: FunctionFields

    def as_tool(self) -> dict[str, Any]:
        """The tool that chat templates take."""
        return {"type": self.type, "function": self.function.model_dump(exclude_unset=True)}


class NamedFunction(Fields):
    """A function by its name."""

    name: Name


class NamedTool(Fields):
    """A tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class SchemaFields(Fields):
    """A JSON schema with a name."""

    name: Name | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """The form that an answer is to have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFields | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """A schema next to `type`, as llama.cpp, Together and Fireworks have it."""

    def schema_of_answers(self) -> dict[str, Any] | None:
        """The JSON schema that the answer is to have; None: it is text.

        Raises:
            ApiError: type json_schema has none.
        """
        if self.type == "text":
            return None
        given = self.json_schema.schema_ if self.json_schema else None
        schema = given if given is not None else self.schema_
        if schema is None and self.type == "json_schema":
            message = "expected json_schema.schema with type json_schema, got none: send it"
            raise ApiError(400, message, param="response_format")
        return {"type": "object"} if schema is None else schema


class ChatRequest(ThinkingFields):
    """A chat, under the names of OpenAI's /v1/chat/completions."""

    kind: ClassVar[str] = "chat"
    messages: Annotated[list[MessageFields], Field(min_length=1)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_TOP)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[ToolFields], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    def require_supported(self) -> None:
        """Refuses fields that contradict each other.

        Raises:
            ApiError: naming the field.
        """
        if self.top_logprobs and not self.logprobs:
            message = "expected logprobs true with top_logprobs, got none: set it"
            raise ApiError(400, message, param="top_logprobs")
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for name, n in Counter(names).items() if n > 1), None)
        if twice:
            raise ApiError(400, f"expected one tool of each name, got two: rename {twice!r}", param="tools")
        wanted = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if (wanted or self.tool_choice == "required") and wanted not in {*names, *([None] if names else [])}:
            message = f"expected a tool to call, got no {wanted or 'tools'!r}: send it in tools"
            raise ApiError(400, message, param="tool_choice")
        if self.answer_form() is not None and self.tools and self.tool_choice != "none":
            message = "expected either tools or a response_format of JSON, got both: set tool_choice none"
            raise ApiError(400, message, param="response_format")
        self._require_free_ends()

    def _require_free_ends(self) -> None:
        """Refuses what keeps an answer from its end where its form has one."""
        tools = self.tool_use()
        name = "ignore_eos" if self.ignore_eos else "min_tokens" if self.min_tokens else None
        if name and (self.answer_form() is not None or (tools and tools.enforced)):
            message = f"expected no {name} with {self.form_field}, whose form says where the answer ends: leave it out"
            raise ApiError(400, message, param=name)

    @property
    def form_field(self) -> str:
        """The field that describes the form of the answers: with tools, these."""
        return "response_format" if self.tool_use() is None else "tools"

    def tool_use(self) -> ToolUse | None:
        """The tools that the answer may call; None: it calls none."""
        from edgemoe.api.tool_use import ToolUse

        if not self.tools or self.tool_choice == "none":
            return None
        choice = self.tool_choice or "auto"
        return ToolUse(
            [tool.as_tool() for tool in self.tools],
            choice if isinstance(choice, str) else choice.function.name,
            self.parallel_tool_calls is not False,
        )

    def answer_form(self) -> Form | None:
        """The form that the answer must have; None: it is any text.

        Raises:
            ApiError: `json_schema` is missing.
        """
        return self.response_format.schema_of_answers() if self.response_format else None

    def switched_on(self) -> bool | None:
        """Whether the variables for the chat template turn reasoning on or off; None: they say nothing of it."""
        given = self.chat_template_kwargs or {}
        on = given.get("enable_thinking", given.get("thinking"))
        return on if isinstance(on, bool) else None

    def template(self, default_budget: int | None = None) -> dict[str, object]:
        """Variables for the chat template. Some call the one that turns reasoning off `thinking`.

        Args:
            default_budget: the server's budget of reasoning, for requests that say nothing; None: no limit.
        """
        tools, given = (
            self.tool_use(),
            self.thinking_variables(default_budget) | (self.chat_template_kwargs or {}),
        )
        if "enable_thinking" in given:
            given.setdefault("thinking", given["enable_thinking"])
        return given | {"tools": tools.tools if tools else None}

    def choices(self) -> list[Choices]:
        """Adds log probabilities and the limit of the answer, where there is one."""
        more: Choices = {}
        if self.logprobs:
            more["logprobs"] = self.top_logprobs or 0
        most = self.max_completion_tokens or self.max_tokens
        if most and most > 0:
            more["max_new_tokens"] = most
        return [choice | more for choice in super().choices()]
