"""The options of how tokens are chosen, and the sampling that they stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.errors import UserError
from edgemoe.models.options.declared import flag, option

if TYPE_CHECKING:
    from edgemoe.engine.sampling import Sampling


@dataclass(frozen=True)
class SamplingOptions:
    """Options of the sampling. None stands for the model's own setting."""

    max_new_tokens: int = option(
        "Most tokens of an answer; 0 or -1, the default: as many as the context has room for.",
        -1,
        short="-n",
        min=-1,
        show_default=False,
    )
    temperature: float | None = option(
        "How much answers vary; 0 always takes the likeliest token. Default: the model's own.", min=0
    )
    top_p: float | None = option(
        "Choose among the likeliest tokens that have this probability together. Default: the model's own.",
        min=0.01,
        max=1,
    )
    top_k: int | None = option(
        "Choose among this many likeliest tokens; 0: among all. Default: the model's own.", min=0
    )
    min_p: float | None = option(
        "Choose among tokens that have at least this share of the likeliest one's probability. Default: 0.",
        min=0,
        max=1,
    )
    repeat_penalty: float | None = option(
        "Above 1, tokens that the answer has already become less likely. Default: the model's own.",
        min=0.01,
        max=100,
    )
    thinking_budget: int | None = option(
        "Most tokens of the model's reasoning, after which it gives its answer; 0: no reasoning. Default: no limit.",
        min=0,
    )
    stop: list[str] | None = option("End an answer before this text; can be given several times.")
    seed: int = option("Seed of all random choices: the same seed gives the same answer.", 0)


def chosen_sampling(directory: Path, tokenizer: Any, options: SamplingOptions) -> Sampling:
    """The sampling of the model in a directory, changed by the options given.

    Args:
        directory: the directory of the store.
        tokenizer: the model's tokenizer.
        options: the options.

    Raises:
        UserError: --top-p, --top-k or --min-p at temperature 0; an empty --stop; --thinking-budget for a model whose
            reasoning cannot be found.
    """
    from edgemoe.engine.sampling import UNLIMITED, Sampling
    from edgemoe.models.ends import ends_of
    from edgemoe.models.runnable import generation_config

    own = Sampling.of_model(
        generation_config(directory),
        ends_of(directory, tokenizer),
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        max_new_tokens=options.max_new_tokens if options.max_new_tokens > 0 else UNLIMITED,
    )
    _require_effect(options, own.temperature, tokenizer)
    chosen: dict[str, Any] = {
        "top_k": options.top_k,
        "min_p": options.min_p,
        "repetition_penalty": options.repeat_penalty,
        "thinking_budget": options.thinking_budget,
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    return replace(own, stop_strings=tuple(options.stop or ()), **chosen)


def _require_effect(options: SamplingOptions, temperature: float, tokenizer: Any) -> None:
    """Refuses options without effect: a choice of tokens where there is none, a budget where there is no reasoning."""
    for name in ("top_p", "top_k", "min_p"):
        if getattr(options, name) is not None and temperature == 0:
            raise UserError(
                f"a temperature above 0 for {flag(name)} {getattr(options, name)}",
                "temperature 0, where there is no choice",
                "give --temperature 0.7 or another one with it",
            )
    if options.thinking_budget is not None:
        from edgemoe.api.thinking import ReasoningTags

        ReasoningTags.of(tokenizer).require()
