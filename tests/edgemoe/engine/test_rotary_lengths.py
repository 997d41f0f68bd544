"""Models whose rotary factors depend on the number of tokens, against one pass of transformers over all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from family_models import load, random_model, save

from edgemoe.engine.engine import Engine
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.errors import ModelRefused
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.store_model import StoreModel

ORIGINAL = 24
TOKENS = torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(3)).tolist()
CLOSE = 0.1
"""Largest difference of a log probability that rounding makes here; other factors make ten times as much."""

SCALED: dict[str, dict[str, Any]] = {
    "phimoe": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "short_mscale": 1.0,
            "long_mscale": 3.0,
            "original_max_position_embeddings": ORIGINAL,
        },
        "sliding_window": None,
    },
    "qwen3_moe": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 8.0},
        "max_position_embeddings": ORIGINAL,
    },
}
"""model_type -> what makes its factors depend on the length."""


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """transformers' model of a type, whose attention depends on positions, and its store."""
    made: dict[str, tuple[Any, Path]] = {}

    def of(kind: str) -> tuple[Any, Path]:
        if kind not in made:
            model = random_model(kind, num_hidden_layers=2, **SCALED[kind])
            for name, weight in model.named_parameters():
                if "q_proj.weight" in name or "q_norm" in name:
                    weight.data.mul_(16)
            directory = save(model, tmp_path_factory.mktemp(kind) / "model", fused=False)
            store = directory.with_name("store")
            convert_checkpoint(directory, store, max_level=8, layout="auto", dense_bits=16)
            made[kind] = load(directory), store
        return made[kind]

    return of


class Rows(Request):
    """A greedy request that keeps the log probabilities of every token."""

    def __init__(self, tokens: list[int], new: int) -> None:
        self.rows: list[torch.Tensor] = []
        sampler = Sampler(Sampling(0, 1, 0, 1, 0, new, frozenset()))
        super().__init__(list(tokens), sampler, on_token=self._keep)

    def _keep(self, token: int, logits: torch.Tensor) -> bool:
        self.rows.append(logits.log_softmax(-1))
        return False


def answer(scheduler: Scheduler, tokens: list[int], new: int = 1) -> Rows:
    request = Rows(tokens, new)
    scheduler.run(request)
    return request


def apart(model: Any, request: Rows, first: int = 0) -> float:
    """The difference of likely tokens' log probabilities to one pass over all tokens before them.

    The median over all rows from `first` on: rounding changes a router's choice in some.
    """
    found = []
    for i, row in enumerate(request.rows[first:], first):
        before = torch.tensor([request.tokens[: request.prompt + i]])
        with torch.no_grad():
            want = model(before, use_cache=False).logits[0, -1].float().log_softmax(-1)
        likely = want.topk(5).indices
        found.append(float((want - row)[likely].abs().max()))
    return median(found)


def opened(open_engine: Any, store: Path, *, rows: int = 16) -> Engine:
    return open_engine(store, context=64, prefill_rows=rows)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", SCALED)
def test_a_prompt_in_steps_has_the_factors_of_its_whole_length(case, open_engine, kind):
    """40 tokens in steps of 16, and then 20 with the factors of a new model."""
    model, store = case(kind)
    scheduler = Scheduler(opened(open_engine, store))
    assert apart(model, answer(scheduler, TOKENS[:40])) < CLOSE
    assert apart(model, answer(scheduler, TOKENS[:20])) < CLOSE


@pytest.mark.e2e
@pytest.mark.parametrize("keep", [False, True])
def test_an_answer_beyond_the_original_length_is_computed_again(case, open_engine, keep):
    """New tokens' log probabilities equal one pass's, on both sides of the crossing."""
    model, store = case("phimoe")
    scheduler = Scheduler(opened(open_engine, store), keep=keep)
    request = answer(scheduler, TOKENS[:20], new=10)
    assert len(request.tokens) == 30
    assert apart(model, request) < CLOSE
    assert apart(model, request, ORIGINAL + 1 - 20) < CLOSE


@pytest.mark.e2e
@pytest.mark.parametrize("kind", SCALED)
def test_kept_keys_go_to_prompts_with_the_same_factors_alone(case, open_engine, kind):
    """A long prompt after a short one that it begins with has the bits that it has in a new engine."""
    _, store = case(kind)
    fresh = answer(Scheduler(opened(open_engine, store)), TOKENS[:40])
    scheduler = Scheduler(opened(open_engine, store), keep=True)
    answer(scheduler, TOKENS[:20], new=2)
    assert answer(scheduler, TOKENS[:22]).cached == 20
    after = answer(scheduler, TOKENS[:40])
    assert after.cached == 0
    assert torch.equal(after.rows[0], fresh.rows[0])
    longer = answer(scheduler, TOKENS[:50])
    assert longer.cached == (40 if kind == "phimoe" else 0)


def test_what_an_answer_computed_again_is_kept_with_the_long_factors(case, open_engine):
    """A second turn continues it, and has the log probabilities of one pass."""
    model, store = case("phimoe")
    scheduler = Scheduler(opened(open_engine, store), keep=True)
    first = answer(scheduler, TOKENS[:20], new=10)
    second = answer(scheduler, [*first.tokens, *TOKENS[50:]], new=7)
    assert second.cached >= 28
    assert apart(model, second) < CLOSE


def test_several_sequences_need_a_context_with_one_set_of_factors(case):
    """Up to the original length nothing depends on other sequences."""
    store = StoreModel.open(case("phimoe")[1])
    assert store.plan(vram_limit=None, context=ORIGINAL, parallel=4).parallel == 4
    with pytest.raises(ModelRefused, match="give --context 24"):
        store.plan(vram_limit=None, context=ORIGINAL + 1, parallel=4)
