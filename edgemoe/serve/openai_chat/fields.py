"""The fields of OpenAI's chats and completions. Unknown ones are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Field

from edgemoe.grammar.lark import Form
from edgemoe.serve.errors import ApiError
from edgemoe.serve.openai_chat.other_servers import CHATS, COMPLETIONS, FormFields, ReasoningFields
from edgemoe.serve.protocol.sending import Delivery
from edgemoe.serve.request.chat import ChatRequest, MessageFields, ToolFields
from edgemoe.serve.request.completion import CompletionRequest
from edgemoe.serve.request.fields import Fields, Name, Whole
from edgemoe.serve.request.neutral import Neutral, penalised_tokens, require_neutral
from edgemoe.serve.request.thinking import Effort


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
    repeat_last_n: Whole | None = None

    def require_obeyed(self, neutral: Neutral, penalty: float | None) -> None:
        """Refuses fields of other servers that would change the answer.

        Args:
            neutral: values with which they do not.
            penalty: the repetition penalty.

        Raises:
            ApiError: naming the field.
        """
        more = penalised_tokens(self.repeat_last_n, penalty)
        require_neutral(
            {**(self.model_extra or {}), "repeat_last_n": self.repeat_last_n}, {**neutral, **more}
        )

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


class ChatFields(ChatRequest, BodyFields, ReasoningFields, FormFields):
    """The body of /v1/chat/completions."""

    model_config = ConfigDict(strict=True, extra="allow")
    functions: Any = None
    function_call: Any = None

    def require_supported(self) -> None:
        """Refuses adapters, the predecessors of `tools`, and what other servers would do with other fields."""
        self.refuse_adapters()
        if self.functions:
            self.refuse("functions", "send tools, which has taken its place")
        if self.functions or self.function_call not in ("none", "auto"):
            self.refuse("function_call", "send tool_choice, which has taken its place")
        self.require_obeyed(CHATS, self.repetition_penalty)
        if self.other_form() and super().answer_form() is not None:
            message = f"expected either response_format or {self.form_field}, got both: leave one of them out"
            raise ApiError(400, message, param=self.form_field)
        super().require_supported()

    @property
    def form_field(self) -> str:
        """The field that describes the form of the answers."""
        other = self.other_form()
        return other[0] if other and not self.tool_use() else super().form_field

    def answer_form(self) -> Form | None:
        """The form that the answer must have, under any of its names.

        Raises:
            ApiError: it is none, or there are several.
        """
        other = self.other_form()
        return other[1] if other else super().answer_form()

    def effort(self) -> Effort | None:
        """The effort, under any of its names."""
        return super().effort() or self.other_effort()

    def explicit_budget(self) -> int | None:
        """The budget of reasoning, under any of its names."""
        given = super().explicit_budget()
        return self.other_budget() if given is None else given

    def switched_on(self) -> bool | None:
        """Whether the request turns reasoning on or off, under any of its names."""
        on = self.other_switch()
        return super().switched_on() if on is None else on

    def template(self, default_budget: int | None = None) -> dict[str, object]:
        """Variables for the chat template, under any of their names; `default_budget` as in ChatRequest.template."""
        given = self.reasoning_variables()
        given |= {"thinking": given["enable_thinking"]} if "enable_thinking" in given else {}
        return given | super().template(default_budget)


class CompletionFields(CompletionRequest, BodyFields):
    """The body of /v1/completions."""

    model_config = ConfigDict(strict=True, extra="allow")

    def require_supported(self) -> None:
        """Refuses adapters too, and what other servers would do with other fields."""
        self.refuse_adapters()
        self.require_obeyed(COMPLETIONS, self.repetition_penalty)
        super().require_supported()


class TokenizeFields(Fields):
    """The body of /tokenize: a text as `prompt` or `content`, or messages.

    Fields that would change the tokens, and that the server does not have, have one value.
    """

    model: Name | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[MessageFields] | None = None
    tools: list[ToolFields] | None = None
    add_special_tokens: Annotated[
        bool | None, Field(validation_alias=AliasChoices("add_special_tokens", "add_special"))
    ] = None
    add_generation_prompt: Literal[True] | None = None
    continue_final_message: Literal[False] | None = None
    chat_template: None = None
    parse_special: Literal[True] | None = None
    with_pieces: Literal[False] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeFields(Fields):
    """The body of /detokenize."""

    model: Name | None = None
    tokens: list[int]
