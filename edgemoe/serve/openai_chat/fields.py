"""The fields of OpenAI's chats and completions. Unknown ones are ignored."""

from __future__ import annotations

from typing import Any

from edgemoe.serve.errors import ApiError
from edgemoe.serve.protocol.sending import Delivery
from edgemoe.serve.request.chat import ChatRequest, MessageFields, ToolFields
from edgemoe.serve.request.completion import CompletionRequest
from edgemoe.serve.request.fields import Fields, Name


class StreamOptions(Fields):
    """Chunks of a stream next to its pieces."""

    include_usage: bool | None = None


class BodyFields(Fields):
    """The fields of a body that say how its answers go out, or that change the model, which is refused."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    lora: Any = None
    lora_request: Any = None
    adapter: Any = None
    adapters: Any = None

    def delivery(self) -> Delivery:
        """How the answers go out."""
        usage = bool(self.stream_options and self.stream_options.include_usage)
        return Delivery(bool(self.stream), usage, bool(self.return_progress))

    def refuse(self, name: str, why: str) -> None:
        """Refuses a field that the server cannot obey, where the body has it.

        Raises:
            ApiError: naming the field.
        """
        if getattr(self, name) is not None:
            message = f"expected no {name}, got one: {why}"
            raise ApiError(400, message, param=name, code="unsupported_parameter")

    def refuse_adapters(self) -> None:
        """Refuses adapters, whatever their name: the field would have changed the model.

        Raises:
            ApiError: naming the field.
        """
        for name in ("lora", "lora_request", "adapter", "adapters"):
            self.refuse(
                name, "LoRA adapters are not applied, so merge them into the model before it is converted"
            )


class ChatFields(ChatRequest, BodyFields):
    """The body of /v1/chat/completions."""

    functions: Any = None
    function_call: Any = None

    def require_supported(self) -> None:
        """Refuses adapters, and the predecessors of `tools` too."""
        self.refuse_adapters()
        self.refuse("functions", "send tools, which has taken its place")
        self.refuse("function_call", "send tool_choice, which has taken its place")
        super().require_supported()


class CompletionFields(CompletionRequest, BodyFields):
    """The body of /v1/completions."""

    def require_supported(self) -> None:
        """Refuses adapters too."""
        self.refuse_adapters()
        super().require_supported()


class TokenizeFields(Fields):
    """The body of /tokenize: a text as `prompt` or `content`, or messages."""

    prompt: str | None = None
    content: str | None = None
    messages: list[MessageFields] | None = None
    tools: list[ToolFields] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeFields(Fields):
    """The body of /detokenize."""

    tokens: list[int]
