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


class Fields(BaseModel):
    """Fields of a JSON object. A field that is null counts as left out."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Known(Fields):
    """Fields without others beside them: an unknown one is an error that names it."""

    model_config = ConfigDict(strict=True, extra="forbid")


Some = TypeVar("Some", bound=Fields)


def parse(kind: type[Some], body: bytes) -> Some:
    """Parses a body.

    Raises:
        ApiError: it is no JSON object, or a field is wrong.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        # Where a value may be of several kinds, each has errors: the deepest is of the kind that was meant.
        first = max(errors, key=lambda each: len(each["loc"]))
        place = ".".join(str(part) for part in first["loc"] if "[" not in str(part)) or "body"
        found = repr(first.get("input"))[:80]
        message = f"expected another {place}, got {found}: {first['msg']}"
        if first["type"] == "extra_forbidden":
            message = f"expected no {place}, got {found}: leave it out"
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
    lora: Any = None
    lora_request: Any = None
    adapter: Any = None
    adapters: Any = None

    def require_supported(self) -> None:
        """Refuses adapters, whatever their name: the field would have changed the model.

        Raises:
            ApiError: naming the field.
        """
        for name in ("lora", "lora_request", "adapter", "adapters"):
            if getattr(self, name) is not None:
                self.refuse(
                    name, "LoRA adapters are not applied, so merge them into the model before it is converted"
                )

    @property
    def count(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def candidates(self) -> int:
        """Answers to each prompt that are generated."""
        return self.count

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def choices(self) -> list[Choices]:
        """The settings of each of `candidates` answers; without a seed each is random."""
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
        return [cast("Choices", given | {"seed": (first + i) % (1 << 63)}) for i in range(self.candidates)]

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


class CompletionFields(SamplingFields):
    """The body of /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None

    @property
    def candidates(self) -> int:
        """Answers to each prompt that are generated, of which the `count` likeliest are shown."""
        return self.best_of or self.count

    def require_supported(self) -> None:
        """Refuses fields that contradict each other."""
        super().require_supported()
        if self.candidates < self.count or (self.candidates > self.count and self.stream):
            found = f"{self.best_of} with n {self.count}{' and stream' if self.stream else ''}"
            message = f"expected best_of of n or more, and only n in a stream, got {found}: use n"
            raise ApiError(400, message, param="best_of")
        if self.suffix and self.echo:
            message = "expected either suffix or echo, got both: leave one of them out"
            raise ApiError(400, message, param="suffix")
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
        if not 1 <= len(prompts) * self.candidates <= MOST_CHOICES:
            found = f"{len(prompts)} prompts of {self.candidates}"
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
        elif self.candidates > self.count:
            more["logprobs"] = 0  # to rank them
        return [choice | more for choice in super().choices()]


class DetokenizeFields(Fields):
    """The body of /detokenize."""

    tokens: list[int]
