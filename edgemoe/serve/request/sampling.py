"""The settings that chats and completions share."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import AliasChoices, BeforeValidator, Field, FiniteFloat

from edgemoe.serve.errors import ApiError
from edgemoe.serve.request.fields import NO_LIMIT, Fields, Whole

if TYPE_CHECKING:
    from edgemoe.api.choices import Choices
    from edgemoe.grammar.lark import Reasoning

MOST_CHOICES = 64
"""Answers of one request: prompts times n."""

MOST_STOPS = 16
"""Strings that end an answer."""

StopString = Annotated[str, Field(max_length=1024)]

MOST_STOP_TOKENS = 128
"""Ids of tokens that end an answer."""

MOST_TOP = 20
"""Likeliest tokens for each token, as OpenAI has it."""

RANDOM_SEED = -1
"""The seed that several servers take for none."""

_AS_NAMED = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
"""Fields that the API has under the same name."""


def _pairs_as_object(value: object) -> object:
    """Pairs of a token id and its bias, as llama.cpp has them, as an object."""
    pairs = isinstance(value, list) and all(isinstance(each, list) and len(each) == 2 for each in value)
    return {str(token): bias for token, bias in value} if isinstance(value, list) and pairs else value


class SamplingRequest(Fields):
    """How many answers are generated, how their tokens are chosen, and whether they go out as they come."""

    kind: ClassVar[str]
    """A word for the list of requests."""

    stream: bool | None = None
    n: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[
        Annotated[Whole, Field(ge=NO_LIMIT)] | None,
        Field(validation_alias=AliasChoices("max_tokens", "n_predict")),
    ] = None
    min_tokens: Annotated[
        Annotated[Whole, Field(ge=0)] | None,
        Field(validation_alias=AliasChoices("min_tokens", "min_new_tokens")),
    ] = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[Whole], Field(max_length=MOST_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None
    seed: Whole | None = None
    temperature: FiniteFloat | None = None
    top_p: FiniteFloat | None = None
    top_k: Whole | None = None
    min_p: FiniteFloat | None = None
    repetition_penalty: Annotated[
        FiniteFloat | None, Field(validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"))
    ] = None
    presence_penalty: FiniteFloat | None = None
    frequency_penalty: FiniteFloat | None = None
    logit_bias: Annotated[dict[str, FiniteFloat] | None, BeforeValidator(_pairs_as_object)] = None

    @abstractmethod
    def require_supported(self) -> None:
        """Refuses fields that contradict each other.

        Raises:
            ApiError: naming the field.
        """

    def reasoning_budget(self, limit: int, default: int | None = None) -> int | None:
        """Most tokens of reasoning; None: no limit, as in texts without a chat template.

        Args:
            limit: most tokens of the answer.
            default: the server's budget.
        """
        return None

    def with_budget(
        self, reasoning: Reasoning | None, form: Choices, choice: Choices, default: int | None
    ) -> Choices:
        """The choices of one answer, with a budget of its reasoning where the tags are known.

        Args:
            reasoning: tags of the answer's reasoning; None: they are not known.
            form: choices that the prompt brings; `max_new_tokens` is the number that the context has room for.
            choice: choices of the request, which go first.
            default: the server's budget, for requests that say nothing; None: no limit.
        """
        given: Choices = {**form, **choice}
        if reasoning is None:
            return given
        budget = self.reasoning_budget(min(form["max_new_tokens"], given["max_new_tokens"]), default)
        given["reasoning"] = reasoning
        if budget is not None:
            given["thinking_budget"] = budget
        return given

    @property
    def form_field(self) -> str:
        """The field that describes the form of the answers, for errors of it."""
        return "response_format"

    @property
    def count(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def candidates(self) -> int:
        """Answers to each prompt that are generated."""
        return self.count

    def choices(self) -> list[Choices]:
        """The settings of each of `candidates` answers; without a seed, or with RANDOM_SEED, each is random."""
        given: dict[str, Any] = {
            name: value for name in _AS_NAMED if (value := getattr(self, name)) is not None
        }
        if self.top_k is not None:
            given["top_k"] = max(self.top_k, 0)  # -1, as vLLM has it, keeps all
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if any(stops):
            given["stop"] = [stop for stop in stops if stop]  # an empty one ends nothing
        if self.stop_token_ids:
            given["stop_token_ids"] = self.stop_token_ids
        if self.ignore_eos:
            given["ignore_ends"] = True
        if self.min_tokens:
            given["min_new_tokens"] = self.min_tokens
        if self.logit_bias:
            given["logit_bias"] = _token_biases(self.logit_bias)
        first = secrets.randbits(31) if self.seed in (None, RANDOM_SEED) else self.seed or 0
        return [cast("Choices", given | {"seed": (first + i) % (1 << 63)}) for i in range(self.candidates)]


def _token_biases(biases: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): value for token, value in biases.items()}
    except ValueError:
        message = "expected token ids as keys of logit_bias, got another text: see POST /tokenize"
        raise ApiError(400, message, param="logit_bias") from None
