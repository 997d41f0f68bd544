"""The continuation of texts, or what stands between two: the request that every protocol's completions become."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag

from edgemoe.serve.errors import ApiError
from edgemoe.serve.request.fields import NO_LIMIT, Whole
from edgemoe.serve.request.sampling import MOST_CHOICES, MOST_TOP, SamplingRequest

if TYPE_CHECKING:
    from edgemoe.api.choices import Choices

COMPLETION_TOKENS = 16
"""max_tokens of a completion, as OpenAI has it."""


def _kind(prompt: object) -> str:
    """Names the kind of a prompt by its first item, so that its items are read once."""
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if isinstance(prompt, list):
        return "[str]" if isinstance(first, str) else "[[int]]" if isinstance(first, list) else "[int]"
    return "[text]"


Prompt = Annotated[
    Annotated[str, Tag("[text]")]
    | Annotated[list[str], Tag("[str]")]
    | Annotated[list[int], Tag("[int]")]
    | Annotated[list[list[int]], Tag("[[int]]")],
    Discriminator(_kind),
]


class CompletionRequest(SamplingRequest):
    """A completion, under the names of OpenAI's /v1/completions."""

    kind: ClassVar[str] = "completion"
    prompt: Prompt
    logprobs: Annotated[Whole, Field(ge=0, le=MOST_TOP)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] | None = None

    @property
    def candidates(self) -> int:
        """Answers to each prompt that are generated, of which the `count` likeliest are shown."""
        return self.best_of or self.count

    def require_supported(self) -> None:
        """Refuses fields that contradict each other.

        Raises:
            ApiError: naming the field.
        """
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
        # The only token of 0 is computed, and not shown.
        more: Choices = {} if most == NO_LIMIT else {"max_new_tokens": max(most, 1)}
        if self.logprobs is not None:
            more["logprobs"] = self.logprobs
            if self.echo:
                more["prompt_logprobs"] = self.logprobs
        elif self.candidates > self.count:
            more["logprobs"] = 0  # to rank them
        return [choice | more for choice in super().choices()]
