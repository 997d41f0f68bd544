"""The fields of ollama's requests, and the chat or completion that they mean. An unknown field is an error."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, FiniteFloat

from edgemoe.serve.errors import ApiError
from edgemoe.serve.protocol.reply import Shape
from edgemoe.serve.request.chat import MOST_TOOLS, ChatRequest, ToolFields
from edgemoe.serve.request.completion import CompletionRequest
from edgemoe.serve.request.fields import Fields, Known, Name, Whole, checked
from edgemoe.serve.request.neutral import SAMPLERS, WITHOUT_PENALTY, penalised_tokens, require_neutral
from edgemoe.serve.request.sampling import MOST_STOPS, MOST_TOP, StopString
from edgemoe.serve.request.thinking import Effort

_log = logging.getLogger("edgemoe.serve")

_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
"""Options that chats have under the same name."""

_WITHOUT_EFFECT = {"mirostat_eta", "mirostat_tau", "penalize_newline"}
"""Options of ways to choose tokens that are off."""


@lru_cache(16)
def _say_clamped(tokens: int, context: int) -> None:
    """Says once that a client's context is larger than the server's, as ollama does in its log."""
    _log.warning("options.num_ctx %d is taken as this server's %d: see --context", tokens, context)


class Options(Fields):
    """How an answer is generated. Options of ollama's loader have no effect: the model is loaded."""

    model_config = ConfigDict(strict=True, extra="allow")
    num_ctx: Annotated[Whole, Field(ge=1)] | None = None
    num_predict: Whole | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: Whole | None = None
    min_p: FiniteFloat | None = None
    seed: Whole | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    repeat_penalty: FiniteFloat | None = None
    repeat_last_n: Whole | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    num_keep: Whole | None = None
    num_batch: Whole | None = None
    num_gpu: Whole | None = None
    main_gpu: Whole | None = None
    num_thread: Whole | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    numa: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None

    def as_fields(self, context: int) -> Shape:
        """The fields of a chat or completion that mean the same.

        Args:
            context: tokens of the server's.

        Raises:
            ApiError: an unknown option, one that would change the answer, or an answer of no tokens.
        """
        self._require_obeyed()
        if self.num_ctx is not None and self.num_ctx > context:
            _say_clamped(self.num_ctx, context)
        if self.num_predict == 0:
            message = "expected options.num_predict of 1 or more, or -1 for no limit, got 0: raise it"
            raise ApiError(400, message, param="options")
        limit = self.num_predict if (self.num_predict or 0) > 0 else None
        given = {name: getattr(self, name) for name in _SAME}
        penalty = None if self.repeat_last_n == 0 else self.repeat_penalty
        return given | {"max_tokens": limit, "repetition_penalty": penalty}

    def _require_obeyed(self) -> None:
        more = self.model_extra or {}
        unknown = sorted(name for name, value in more.items() if value not in (None, [], {}))
        unknown = [name for name in unknown if name not in SAMPLERS and name not in _WITHOUT_EFFECT]
        if unknown:
            message = (
                f"expected no options.{unknown[0][:60]}, got {repr(more[unknown[0]])[:60]}: leave it out"
            )
            raise ApiError(400, message, param="options")
        neutral = {**SAMPLERS, **penalised_tokens(self.repeat_last_n or None, self.repeat_penalty)}
        require_neutral({**more, WITHOUT_PENALTY: self.repeat_last_n or None}, neutral, field="options")


class Body(Known):
    """The fields of both kinds of requests.

    `truncate` and `shift`, which ollama's clients send, have no effect: a prompt that is too long is refused, and an
    answer ends with the context.
    """

    model: Name
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: Effort | bool | None = None
    options: Options | None = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MOST_TOP)] | None = None
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def streamed(self) -> bool:
        """Whether the answer comes in parts: by default it does."""
        return self.stream is not False

    def _settings(self, context: int) -> Shape:
        return (self.options or Options()).as_fields(context)

    def _as_chat(self, messages: list[Shape], context: int, tools: list[Shape] | None = None) -> ChatRequest:
        form: Shape | None = {"type": "json_object"} if self.format == "json" else None
        if isinstance(self.format, dict):
            form = {"type": "json_schema", "json_schema": {"schema": self.format}}
        on = None if self.think is None else self.think not in (False, "none")
        given = self._settings(context) | {
            "messages": messages,
            "tools": tools,
            "response_format": form,
            "chat_template_kwargs": None if on is None else {"enable_thinking": on},
            "reasoning_effort": self.think if isinstance(self.think, str) else None,
            "thinking_budget": 0 if self.think is False else None,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
        }
        return checked(ChatRequest, {name: value for name, value in given.items() if value is not None})


class CalledFields(Fields):
    """The function of a call that a message repeats."""

    name: Name
    arguments: dict[str, Any] | None = None


class CallFields(Fields):
    """A call that a message repeats; ollama's own clients send no `id`."""

    id: Name | None = None
    function: CalledFields


class MessageFields(Known):
    """A message of a conversation."""

    role: Name
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[CallFields] | None = None
    tool_name: Name | None = None
    tool_call_id: Name | None = None

    def as_message(self) -> Shape:
        """The message of a chat; its pictures come before its text."""
        calls = [call.model_dump(exclude_none=True) for call in self.tool_calls or ()]
        given = {
            "role": self.role,
            "content": _with_images(self.content, self.images),
            "reasoning_content": self.thinking,
            "tool_calls": calls or None,
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
        }
        return {name: value for name, value in given.items() if value is not None}


def _with_images(text: str | None, images: list[str] | None) -> str | list[Shape] | None:
    """The content of a message with pictures in base64."""
    if not images:
        return text
    parts: list[Shape] = [
        {"type": "image_url", "image_url": {"url": f"data:;base64,{image}"}} for image in images
    ]
    return [*parts, {"type": "text", "text": text or ""}]


class ChatBody(Body):
    """The body of /api/chat."""

    messages: list[MessageFields] | None = None
    tools: Annotated[list[ToolFields], Field(max_length=MOST_TOOLS)] | None = None

    def as_chat(self, context: int) -> ChatRequest:
        """The body of /v1/chat/completions that means the same; `context` as in Options.as_fields.

        Raises:
            ApiError: a field that chats do not have, or a wrong one.
        """
        tools = [tool.as_tool() for tool in self.tools or ()]
        return self._as_chat([each.as_message() for each in self.messages or ()], context, tools or None)


class GenerateBody(Body):
    """The body of /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    template: str | None = None
    context: list[int] | None = None

    @property
    def is_text(self) -> bool:
        """Whether the prompt is continued as it is, or up to a suffix, without the chat template."""
        return bool(self.raw or self.suffix)

    def require_supported(self) -> None:
        """Refuses fields that the server cannot obey, or cannot obey for a prompt without the chat template.

        Raises:
            ApiError: naming the field.
        """
        if self.images and self.is_text:
            message = "expected no images without the chat template, got some: send raw false"
            raise ApiError(400, message, param="images", code="unsupported_content")
        for name, instead in (("context", "send the messages to /api/chat"), ("template", "send raw true")):
            if getattr(self, name):
                message = f"expected no {name}, got one: {instead}"
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        more = next(
            (name for name in ("system", "format", "think") if self.is_text and getattr(self, name)), None
        )
        if more:
            message = f"expected no {more} with raw or suffix, got one: leave it out"
            raise ApiError(400, message, param=more)

    def as_chat(self, context: int) -> ChatRequest:
        """The body of /v1/chat/completions that means the same; `context` as in Options.as_fields.

        Raises:
            ApiError: as ChatBody.as_chat.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        content = _with_images(self.prompt, self.images)
        return self._as_chat([*system, {"role": "user", "content": content}], context)

    def as_completion(self, context: int) -> CompletionRequest:
        """The body of /v1/completions that means the same; `context` as in Options.as_fields.

        Raises:
            ApiError: a wrong field.
        """
        top = (self.top_logprobs or 0) if self.logprobs else None
        given = {"max_tokens": context} | {
            name: value
            for name, value in (self._settings(context) | {"suffix": self.suffix, "logprobs": top}).items()
            if value is not None
        }
        return checked(CompletionRequest, given | {"prompt": self.prompt})


class ShowBody(Known):
    """The body of /api/show; older clients call the model `name`."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None
