"""The fields of request bodies: their types and ranges. Unknown fields are ignored, wrong ones are errors."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from edgemoe.serve.errors import ApiError

if TYPE_CHECKING:
    from edgemoe.api.model import Choices

MOST_CHOICES = 64
"""Answers of one request: prompts times n."""

MOST_TOP = 20
"""Likeliest tokens beside each token, as OpenAI has it."""

COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions, as OpenAI has it."""

_ROLES = {"developer": "system"}
"""OpenAI's newer names of roles -> those that chat templates have."""


class Fields(BaseModel):
    """Fields of a JSON object. A field that is null counts as left out."""

    model_config = ConfigDict(strict=True, extra="ignore")


Some = TypeVar("Some", bound=Fields)


def parse(kind: type[Some], body: bytes) -> Some:
    """Parses a body.

    Raises:
        ApiError: it is no JSON object, or a field is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "body"
        found = repr(first.get("input"))[:80]
        message = f"expected another {place}, got {found}: {first['msg']}"
        raise ApiError(400, message, param=str(first["loc"][0]) if first["loc"] else None) from None


class StreamOptions(Fields):
    """What a stream has beside its pieces."""

    include_usage: bool | None = None


class SamplingFields(Fields):
    """What chats and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: int | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: int | None = None
    min_p: FiniteFloat | None = None
    repetition_penalty: FiniteFloat | None = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    logit_bias: dict[str, FiniteFloat] | None = None

    @property
    def count(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def choices(self) -> list[Choices]:
        """The settings of each of `count` answers; without a seed each is random."""
        given: dict[str, Any] = {
            name: value
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", *_PENALTIES)
            if (value := getattr(self, name)) is not None
        }
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)  # -1, as vLLM has it, keeps all
        if self.stop:
            given["stop"] = self.stop
        if self.logit_bias:
            given["logit_bias"] = _token_biases(self.logit_bias)
        first = secrets.randbits(31) if self.seed is None else self.seed
        return [cast("Choices", given | {"seed": (first + i) % (1 << 63)}) for i in range(self.count)]

    def refuse(self, name: str, why: str) -> None:
        """Raises the error of a field that the server cannot obey."""
        raise ApiError(400, f"expected no {name}, got one: {why}", param=name, code="unsupported_parameter")


_PENALTIES = ("presence_penalty", "frequency_penalty")


def _token_biases(biases: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in biases.items()}
    except ValueError:
        message = "expected token ids as keys of logit_bias, got another text: see POST /tokenize"
        raise ApiError(400, message, param="logit_bias") from None


class Part(Fields):
    """A part of a message's content."""

    type: str
    text: str | None = None


class MessageFields(Fields):
    """A message of a conversation."""

    role: str
    content: str | list[Part] | None = None

    def as_message(self) -> dict[str, str]:
        """The message that chat templates take.

        Raises:
            ApiError: a part that is no text.
        """
        content = self.content or ""
        if isinstance(content, list):
            other = next((part.type for part in content if part.type != "text"), None)
            if other is not None:
                message = f"expected parts of type text, got {other!r}: this model takes text alone"
                raise ApiError(400, message, param="messages", code="unsupported_content")
            content = "\n".join(part.text or "" for part in content)
        return {"role": _ROLES.get(self.role, self.role), "content": content}


class ResponseFormat(Fields):
    """The form that an answer is to have."""

    type: str


class ChatFields(SamplingFields):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[MessageFields], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    response_format: ResponseFormat | None = None

    def require_supported(self) -> None:
        """Refuses what would change the answer's form, and is not there."""
        if (self.tools and self.tool_choice != "none") or self.functions:
            self.refuse("tools" if self.tools else "functions", "calls of tools are not supported")
        if self.response_format and self.response_format.type != "text":
            self.refuse("response_format", "only text is supported")
        if self.top_logprobs is not None and not self.logprobs:
            message = "expected logprobs true with top_logprobs, got none: set it"
            raise ApiError(400, message, param="top_logprobs")

    def template(self) -> dict[str, object]:
        """Variables for the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})

    def choices(self) -> list[Choices]:
        """Adds log probabilities and the limit of the answer, where there is one."""
        more: Choices = {}
        if self.logprobs:
            more["logprobs"] = self.top_logprobs or 0
        most = self.max_completion_tokens or self.max_tokens
        if most:
            more["max_new_tokens"] = most
        return [choice | more for choice in super().choices()]


class CompletionFields(SamplingFields):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def require_supported(self) -> None:
        """Refuses what would change the answer's form, and is not there."""
        if self.suffix:
            self.refuse("suffix", "a text in the middle is not supported")
        if self.best_of is not None and self.best_of != self.count:
            self.refuse("best_of", "choices are not ranked; use n")
        if self.max_tokens == 0 and not self.echo:
            message = "expected max_tokens of 1 or more without echo, got 0: raise it, or set echo"
            raise ApiError(400, message, param="max_tokens")

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids.

        Raises:
            ApiError: there is none, or there are too many.
        """
        prompt = self.prompt
        several = not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], int))
        prompts: Any = prompt if several else [prompt]
        if not 1 <= len(prompts) * self.count <= MOST_CHOICES:
            found = f"{len(prompts)} prompts of {self.count}"
            message = (
                f"expected 1 to {MOST_CHOICES} answers in one request, got {found}: send several requests"
            )
            raise ApiError(400, message, param="prompt")
        return list(prompts)

    def choices(self) -> list[Choices]:
        """Adds log probabilities, of the prompt too with echo, and the limit of the answer."""
        most = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        more: Choices = {"max_new_tokens": max(most, 1)}  # the only token of 0 is computed, and not shown
        if self.logprobs is not None:
            more["logprobs"] = self.logprobs
            if self.echo:
                more["prompt_logprobs"] = self.logprobs
        return [choice | more for choice in super().choices()]


class TokenizeFields(Fields):
    """The body of /tokenize: a text as `prompt` or `content`, or messages."""

    prompt: str | None = None
    content: str | None = None
    messages: list[MessageFields] | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeFields(Fields):
    """The body of /detokenize."""

    tokens: list[int]
