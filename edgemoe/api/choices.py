"""How an answer's tokens are chosen: the choices of a caller, and the settings that are made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol, TypedDict, get_type_hints

from edgemoe.api.value_types import is_of, kind_of, with_type
from edgemoe.engine.engine import Engine
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.errors import UserError
from edgemoe.grammar.lark import Reasoning
from edgemoe.grammar.matcher import Grammar, Matcher


class Choices(TypedDict, total=False):
    """How an answer's tokens are chosen and when it ends. A missing key, or None, stands for the model's own setting.

    `stop_token_ids` end an answer as the model's own ends do, and `ignore_ends` leaves the model's own ones out. After
    `thinking_budget` tokens of reasoning its tag is closed; 0 is an answer without reasoning. `reasoning` has the tags
    where the caller knows them.
    """

    max_new_tokens: int
    stop: str | Sequence[str]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    logprobs: int
    prompt_logprobs: int
    special_tokens: bool
    stop_token_ids: Sequence[int]
    ignore_ends: bool
    min_new_tokens: int
    thinking_budget: int
    schema: Mapping[str, object] | Grammar
    reasoning: Reasoning


def sampling_of(own: Sampling, choices: Choices, vocab: int) -> Sampling:
    """Returns a model's own settings, changed by the choices given; `schema` and `reasoning` are left to the caller.

    Args:
        own: the model's settings.
        choices: the client's settings for one request, by the names of Choices.
        vocab: number of the model's tokens.

    Raises:
        UserError: a choice that does not exist or has another type, or a token that the model does not have.
    """
    given: dict[str, Any] = {name: value for name, value in choices.items() if value is not None}
    unknown = given.keys() - Choices.__annotations__.keys()
    if unknown:
        known = ", ".join(Choices.__annotations__)
        raise UserError(f"choices out of {known}", f"{min(unknown)!r}", "leave it out")
    for name, value in given.items():
        if not is_of(value, _types()[name]):
            raise UserError(f"{kind_of(_types()[name])} for {name}", with_type(value), "give such a value")
    for name in ("schema", "reasoning"):
        given.pop(name, None)
    if "stop" in given:
        stop = given.pop("stop")
        given["stop_strings"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if "logprobs" in given:
        given["top_logprobs"] = given.pop("logprobs")
    if "logit_bias" in given:
        given["logit_bias"] = tuple(given["logit_bias"].items())
        _require_tokens("logit_bias", (token for token, _ in given["logit_bias"]), vocab)
    more, ends = given.pop("stop_token_ids", ()), own.stop
    _require_tokens("stop_token_ids", more, vocab)
    if given.pop("ignore_ends", False):
        ends = frozenset()
    given["stop"] = ends | set(more)
    return replace(own, **given)


@cache
def _types() -> dict[str, Any]:
    return get_type_hints(Choices)


def _require_tokens(name: str, tokens: Iterable[int], vocab: int) -> None:
    wrong = next((token for token in tokens if not 0 <= token < vocab), None)
    if wrong is not None:
        raise UserError(f"token ids of 0 to {vocab - 1} in {name}", f"{wrong}", "leave it out")


class ChoosingModel(Protocol):
    """A model, as far as its samplers depend on it (api.model.Model)."""

    engine: Engine
    sampling: Sampling

    def grammar(self, schema: Mapping[str, object]) -> Grammar:
        """Compiles a JSON schema."""


def sampler_of(model: ChoosingModel, choices: Choices) -> Sampler:
    """Returns a sampler with a model's settings, changed by the choices given.

    Raises:
        UserError: as sampling_of, and as Model.grammar.
    """
    sampling = sampling_of(model.sampling, choices, model.engine.shape.vocab)
    schema = choices.get("schema")
    if schema is None:
        return Sampler(sampling)
    return Sampler(sampling, Matcher(schema if isinstance(schema, Grammar) else model.grammar(schema)))
