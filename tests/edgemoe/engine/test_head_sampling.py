"""Answers that are drawn, with guesses by a model's head: the distribution of tokens, and the answer to a seed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from head_models import model_with_head, save_with_head
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from edgemoe.engine.drafts.drafting import Drafting
from edgemoe.engine.drafts.gate import DraftGate
from edgemoe.engine.drafts.head import new_drafter
from edgemoe.engine.engine import Engine
from edgemoe.engine.request import Request
from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.engine.scheduler import Scheduler
from edgemoe.models.conversion.run import convert_checkpoint

VOCABULARY, PROMPT, NEW = 8, [5, 1, 3, 7, 2, 6], 4
DRAWN = Sampling(1.0, 1.0, 0, 1.0, 0, NEW, frozenset())
ANSWERS, LONG = 3, 160


class EveryStep(DraftGate):
    """Allows all guesses, whatever they cost."""

    def open(self, sequences: int) -> bool:
        return True

    def counts(self, acceptances: Any, proposed: Any, limit: int, *, computed: bool = False) -> list[int]:
        return list(proposed)

    def observe(self, sequences: int, drafted: int, accepted: int, seconds: float) -> None:
        pass


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drawn")
    model, head = model_with_head("glm4_moe", vocab_size=VOCABULARY)
    with torch.no_grad():
        model.lm_head.weight.mul_(6)  # far from equally likely tokens
    checkpoint = save_with_head(model, head, directory / "checkpoint")
    words = WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(checkpoint)
    convert_checkpoint(checkpoint, directory / "store", max_level=8, layout="auto", dense_bits=16)
    return directory / "store"


def guessing(engine: Engine) -> Scheduler:
    """A scheduler whose steps have as many guesses as there may be."""
    scheduler, make = Scheduler(engine), partial(new_drafter, engine.head)
    scheduler.loop.drafting = Drafting(
        lambda: engine.most_drafts, engine.plan.decode_rows, None, make, EveryStep()
    )
    return scheduler


def drawn(scheduler: Scheduler, **changes: Any) -> Request:
    request = Request(list(PROMPT), Sampler(replace(DRAWN, **changes)))
    scheduler.run(request)
    return request


def keep_rows(rows: list[torch.Tensor], before: int, logits: torch.Tensor) -> None:
    rows.append(logits.clone())


def most_by_chance(freedom: int) -> float:
    """The value that a chi-squared variable exceeds once in a thousand times (Wilson and Hilferty)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.09 * part**0.5) ** 3


def test_tokens_have_the_distribution_of_the_model(open_engine, store):
    """The likeliest token, the second and so on are drawn as often as their probabilities add up to."""
    plain = Scheduler(open_engine(store, context=512))
    scheduler = guessing(open_engine(store, drafts="mtp", context=512))
    counts, expected = torch.zeros(2, VOCABULARY, dtype=torch.float64)
    spread, accepted = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64), 0
    for seed in range(ANSWERS):
        answer = drawn(scheduler, seed=seed, max_new_tokens=LONG)
        accepted += answer.trace.accepted
        rows = list[torch.Tensor]()
        keep = partial(keep_rows, rows)
        plain.run(Request(list(answer.tokens), Sampler(DRAWN), on_rows=keep, scored=True))
        chances, order = torch.cat(rows)[len(PROMPT) - 1 : -1].double().softmax(-1).sort(descending=True)
        places = (order == torch.tensor(answer.tokens[len(PROMPT) :])[:, None]).nonzero()[:, 1]
        counts += torch.bincount(places, minlength=VOCABULARY)
        expected += chances.sum(0)
        spread += torch.diag(chances.sum(0)) - chances.T @ chances
    assert accepted > ANSWERS * LONG / 20
    errors = (counts - expected)[:-1]
    square = errors @ torch.linalg.solve(spread[:-1, :-1], errors)
    assert square < most_by_chance(VOCABULARY - 1)


@pytest.mark.parametrize(
    "how", [{}, {"top_k": 4, "repetition_penalty": 1.3}, {"top_p": 0.6, "top_logprobs": 2}]
)
def test_a_seed_gives_the_answer_that_it_gives_without_a_head(open_engine, store, how):
    """With all experts in memory: guesses are checked against the same draws, whichever rule draws."""
    plain, scheduler = Scheduler(open_engine(store)), guessing(open_engine(store, drafts="mtp"))
    guessed = 0
    for seed in range(4):
        answer = drawn(scheduler, seed=seed, max_new_tokens=16, **how)
        assert answer.tokens == drawn(plain, seed=seed, max_new_tokens=16, **how).tokens
        guessed += answer.trace.accepted
    assert guessed
