"""policy.drawing against the probabilities of transformers' own warpers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation import MinPLogitsWarper, TopPLogitsWarper

from edgemoe.engine.sampling import Sampler, Sampling
from edgemoe.errors import UserError
from edgemoe.policy.drawing import UNIT, DrawRule, Draws


def probabilities(
    scores: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Float32 [vocab], by transformers."""
    scores = TemperatureLogitsWarper(temperature)(None, scores[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    "settings",
    [(1.0, 0, 1.0, 0.0), (0.6, 20, 0.95, 0.0), (2.5, 0, 0.7, 0.0), (1.5, 30, 0.9, 0.3), (9.0, 5, 1.0, 0.1)],
)
def test_tokens_come_as_often_as_transformers_says(settings):
    """Random numbers in equal distances: each token comes as often as its probability says, and no other one comes."""
    scores = torch.randn(60, generator=torch.Generator().manual_seed(2)) * 2
    rule, count = DrawRule.of(*settings), 512
    tokens = [rule.draw(scores, (2 * i + 1 << UNIT) // (2 * count)) for i in range(count)]
    shares = torch.bincount(torch.tensor(tokens), minlength=60) / count
    want = probabilities(scores, *settings)
    assert (shares - want).abs().max() <= 1 / count
    assert not shares[want == 0].any()


def test_flat_probabilities_of_a_large_vocabulary():
    """Thousands of tokens are left, and many have equal scores: tokens stand by score, then by id."""
    scores = (torch.randn(40_000, generator=torch.Generator().manual_seed(3)) * 4).round() / 4
    order = torch.sort(scores, descending=True, stable=True).indices
    weights = torch.exp2((scores[order] - scores.max()).double() / np.log(2) / 3)
    sums = (weights / weights.sum()).cumsum(0)
    for part in (0.0, 0.1, 0.5, 0.9):
        number = int(part * (1 << UNIT))
        for top_p in (1.0, 0.999):
            at = int(torch.searchsorted(sums, part * top_p))
            token = DrawRule.of(3.0, 0, top_p).draw(scores, number)
            assert abs(int((order == token).nonzero()) - at) <= 1


def test_numbers_go_on_after_a_change_of_the_rule():
    """The seed's numbers come in turn, each once, also where they were looked at before."""
    plain = Draws(None, 4)
    numbers = [plain.next() for _ in range(300)]
    draws = Draws(None, 4)
    assert draws.coming(200).tolist() == numbers[:200]
    assert [draws.next() for _ in range(90)] == numbers[:90]
    changed = draws.changed(DrawRule.of(1.0))
    assert [changed.next() for _ in range(210)] == numbers[90:]
    assert draws.next() == numbers[90]
    assert max(numbers) < 1 << UNIT
    assert Draws(None, 5).next() != numbers[0]


class Forbids:
    """A grammar that has no next token."""

    def __call__(self, tokens, scores):
        return scores.fill_(-torch.inf)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_answer_whose_settings_leave_no_token_says_which_they_are(temperature):
    """Neither a forbidden token comes nor an error of an index."""
    settings = Sampling(temperature, 1.0, 0, 1.0, 0, 9, frozenset({0, 1}), min_new_tokens=2)
    with pytest.raises(UserError, match=r"none: min_new_tokens forbid all"):
        Sampler(settings).next([1], torch.zeros(2))
    with pytest.raises(UserError, match=r"none: its grammar and min_new_tokens forbid all"):
        Sampler(settings, Forbids()).next([1], torch.zeros(4))
