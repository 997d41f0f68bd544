"""The fields of Anthropic's messages, and the chat that they mean. An unknown field is an error that names it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat

from edgemoe.serve.errors import ApiError
from edgemoe.serve.protocol.reply import Shape
from edgemoe.serve.request.chat import MOST_TOOLS, ChatRequest
from edgemoe.serve.request.fields import Known, Name, Whole, checked
from edgemoe.serve.request.sampling import MOST_STOPS, StopString

_BILLING = "x-anthropic-billing-header:"
"""A block of Claude Code's system prompt, for Anthropic's accounts. It may differ in every request."""


class Cached(Known):
    """A part of a prompt. `cache_control` has no effect: every prompt is kept for later ones that begin alike."""

    cache_control: Any = None


class TextBlock(Cached):
    """Text of a message, of a tool's result, or of the system prompt. Citations say nothing to a model."""

    type: Literal["text"]
    text: str
    citations: Any = None

    def as_part(self) -> Shape:
        """The part of a chat's message."""
        return {"type": "text", "text": self.text}


class ImageSource(Known):
    """The bytes of a picture in base64, or an address, which is refused."""

    type: Name
    media_type: Name | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Cached):
    """A picture of a message."""

    type: Literal["image"]
    source: ImageSource

    def as_part(self) -> Shape:
        """The part of a chat's message.

        Raises:
            ApiError: its bytes are not there.
        """
        if self.source.type != "base64" or self.source.data is None:
            message = f"expected a picture's source of type base64, got {self.source.type!r}: send its bytes"
            raise ApiError(400, message, param="messages", code="unsupported_content")
        return {"type": "image_url", "image_url": {"url": f"data:;base64,{self.source.data}"}}


class ThinkingBlock(Known):
    """Reasoning of an answer, which the client sends back. The server signs none, and reads no signature."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(Known):
    """Reasoning that another server has encrypted. It says nothing to this model, and is left out."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(Cached):
    """A call of an answer, which the client sends back."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]

    def as_call(self) -> Shape:
        """The call of a chat's message."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


class ToolResultBlock(Cached):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None

    def as_message(self) -> Shape:
        """The message of a chat. Chat templates have no place for `is_error`: the text says it."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(block.text for block in content)
        before = "Error: " if self.is_error else ""
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": before + text}


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]

_ALLOWED = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}
"""Role -> the types of its blocks."""


class Turn(Known):
    """A message: the user's, with text, pictures and tools' results; the assistant's, with text, reasoning and
    calls; or an instruction in between, with role system.
    """

    role: Literal["system", "user", "assistant"]
    content: str | list[Block]

    def as_messages(self) -> list[Shape]:
        """The messages of a chat, in which each result of a tool is one.

        Raises:
            ApiError: a block that is not of this role.
        """
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        allowed = _ALLOWED[self.role]
        wrong = next((block.type for block in self.content if block.type not in allowed), None)
        if wrong:
            wanted = f"blocks of type {' or '.join(allowed)} of the {self.role}"
            message = f"expected {wanted}, got {wrong!r}: move it"
            raise ApiError(400, message, param="messages")
        if self.role == "assistant":
            return [self._of_assistant(self.content)]
        return self._of_client(self.content)

    def _of_client(self, blocks: list[Block]) -> list[Shape]:
        messages: list[Shape] = []
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                messages.append(block.as_message())
            elif isinstance(block, TextBlock | ImageBlock):
                if not messages or messages[-1]["role"] != self.role:
                    messages.append({"role": self.role, "content": []})
                messages[-1]["content"].append(block.as_part())
        return messages or [{"role": self.role, "content": ""}]

    def _of_assistant(self, blocks: list[Block]) -> Shape:
        message: Shape = {
            "role": "assistant",
            "content": [block.as_part() for block in blocks if isinstance(block, TextBlock)],
        }
        thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
        calls = [block.as_call() for block in blocks if isinstance(block, ToolUseBlock)]
        more = {"reasoning_content": "\n".join(thoughts), "tool_calls": calls}
        return message | {name: value for name, value in more.items() if value}


class Tool(Cached):
    """A tool of the client's."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None

    def as_tool(self) -> Shape:
        """The tool of a chat. `eager_input_streaming` has no effect: a call comes as a whole."""
        more = {"description": self.description, "strict": self.strict}
        known = {name: value for name, value in more.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, "parameters": self.input_schema} | known}


class ToolChoice(Known):
    """The tools that are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None

    def as_choice(self) -> object:
        """The tool_choice of a chat."""
        if (self.type == "tool") != (self.name is not None):
            message = f"expected a name with type tool, and with no other, got type {self.type!r}: change one of them"
            raise ApiError(400, message, param="tool_choice")
        named = {"type": "function", "function": {"name": self.name}}
        return named if self.type == "tool" else {"any": "required"}.get(self.type, self.type)


class Thinking(Known):
    """Whether the model reasons before it answers, and how much. `display` has no effect: reasoning comes as it is."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[Whole, Field(ge=0)] | None = None
    display: str | None = None

    def as_fields(self) -> Shape:
        """The fields of a chat that mean the same."""
        on = self.type != "disabled"
        kwargs = {"enable_thinking": on}
        return {"chat_template_kwargs": kwargs, "thinking_budget": self.budget_tokens if on else 0}


class OutputFormat(Known):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Known):
    """How the answer is to be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountFields(Known):
    """The body of /v1/messages/count_tokens.

    Fields of caches, bills and service have no effect, nor has `context_management`: every message is in the prompt.
    """

    model: Name
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    context_management: Any = None
    betas: Any = None
    speed: Any = None
    inference_geo: Any = None

    def as_chat(self) -> ChatRequest:
        """The body of /v1/chat/completions that means the same.

        Raises:
            ApiError: a field that chats do not have, or a wrong one.
        """
        if self.messages[-1].role == "assistant":
            message = "expected a last message of the user, got one of the assistant: it cannot be continued"
            raise ApiError(400, message, param="messages")
        given = {name: value for name, value in self._as_chat().items() if value is not None}
        return checked(ChatRequest, given)

    def _as_chat(self) -> Shape:
        turns = [message for turn in self.messages for message in turn.as_messages()]
        system: Any = self.system
        if isinstance(system, list):
            system = [block.as_part() for block in system if not block.text.startswith(_BILLING)]
        if system:
            turns.insert(0, {"role": "system", "content": system})
        choice, output = self.tool_choice, self.output_config
        form = output.format if output else None
        schema = {"type": "json_schema", "json_schema": {"schema": form.schema_}} if form else None
        return {
            "messages": turns,
            "tools": [tool.as_tool() for tool in self.tools] if self.tools else None,
            "tool_choice": choice.as_choice() if choice else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
            **(self.thinking.as_fields() if self.thinking else {}),
            "reasoning_effort": output.effort if output else None,
            "response_format": schema,
        }


class MessagesFields(CountFields):
    """The body of /v1/messages."""

    max_tokens: Annotated[Whole, Field(ge=1)]
    stop_sequences: Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: Whole | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Any = None

    def _as_chat(self) -> Shape:
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        return (
            super()._as_chat() | {name: getattr(self, name) for name in same} | {"stop": self.stop_sequences}
        )
