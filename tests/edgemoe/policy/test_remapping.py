"""edgemoe/policy/remapping.py: tokens' agreement, against a plain reading of the paper, and its twin in C."""

from __future__ import annotations

import ctypes
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from availability import needs_native
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.errors import UserError
from edgemoe.families.base import Gate
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.router import NativeRouter, RouterForm
from edgemoe.kernels.native.structures import RemappingRule
from edgemoe.layers.remapped_router import remapped
from edgemoe.layers.router import CompiledRouter
from edgemoe.policy.remapping import MOST_BINS, Movable, Remapping, prefer_resident


@st.composite
def steps(draw: st.DrawFn) -> tuple[torch.Tensor, int, Remapping]:
    """bf16 logits of a step, experts of a token, and how tokens agree; few distinct logits, so that there are ties."""
    tokens, experts = draw(st.integers(2, 6)), draw(st.integers(2, 9))
    spread = draw(st.sampled_from([0.5, 2.0, 8.0]))
    values = draw(st.lists(st.integers(-8, 8), min_size=tokens * experts, max_size=tokens * experts))
    logits = (torch.tensor(values) * (spread / 8)).view(tokens, experts).bfloat16()
    remapping = Remapping(draw(st.sampled_from([0.5, 1.0, 2.0, 4.0])), draw(st.integers(1, 8)))
    return logits, draw(st.integers(1, experts)), remapping


def by_hand(logits: list[list[float]], top_k: int, alpha: float, bins: int) -> list[list[int]]:
    """The paper's steps one after another, scores as fractions."""
    tokens, experts = len(logits), range(len(logits[0]))
    binned = [[max(math.ceil(alpha * (z - max(row))), -bins) for z in row] for row in logits]
    score = [sum(Fraction(tokens) ** binned[t][e] for t in range(tokens)) for e in experts]
    chosen = []
    for row, of in zip(logits, binned, strict=True):
        first = row.index(max(row))
        ranked = sorted(experts, key=lambda e: (e != first, -of[e], -score[e], -row[e], e))
        chosen.append(sorted(ranked[:top_k], key=lambda e: (-row[e], e)))
    return chosen


@given(steps())
def test_tokens_agree_as_the_paper_says(step):
    """Bins, votes, the likeliest expert of each token and the order of the result are a plain loop's."""
    logits, top_k, remapping = step
    want = by_hand(logits.float().tolist(), top_k, remapping.alpha, remapping.bins)
    assert remapping.choose(logits, top_k).tolist() == want


@pytest.mark.e2e
@given(steps(), st.data())
def test_only_some_bins_or_ranks_change(step, data):
    """Votes count within the bins alone, and the token's own experts of other ranks stay, by a plain loop."""
    logits, top_k, remapping = step
    bins = data.draw(st.none() | st.sets(st.integers(0, remapping.bins)))
    ranks = data.draw(st.none() | st.sets(st.integers(0, top_k - 1)))
    only = Movable(None if bins is None else tuple(bins), None if ranks is None else tuple(ranks))
    rows, experts = logits.float().tolist(), range(logits.shape[1])
    binned = [
        [max(math.ceil(remapping.alpha * (z - max(row))), -remapping.bins) for z in row] for row in rows
    ]
    score = [sum(Fraction(len(rows)) ** of[e] for of in binned) for e in experts]
    for row, of, found in zip(rows, binned, remapping.choose(logits, top_k, only).tolist(), strict=True):
        own = sorted(experts, key=lambda e: (-row[e], e))[:top_k]
        stay = own[:1] if ranks is None else [e for rank, e in enumerate(own) if rank not in ranks]
        votes = [score[e] if bins is None or -of[e] in bins else 0 for e in experts]
        others = sorted(set(experts) - set(stay), key=lambda e: (-of[e], -votes[e], -row[e], e))
        want = stay + others[: top_k - len(stay)]
        assert found == sorted(want, key=lambda e: (-row[e], e))


@pytest.mark.e2e
@given(steps(), st.data())
def test_resident_experts_come_first_within_a_bin(step, data):
    """By a plain loop, with as many bins as the logits need."""
    logits, top_k, remapping = step
    experts = range(logits.shape[1])
    there = data.draw(st.sets(st.sampled_from(experts)))
    resident = torch.tensor([e in there for e in experts])
    found = prefer_resident(logits, top_k, remapping.alpha, resident).tolist()
    for row, chosen in zip(logits.float().tolist(), found, strict=True):
        first = row.index(max(row))
        of = [math.ceil(remapping.alpha * (z - max(row))) for z in row]
        ranked = sorted(experts, key=lambda e: (e != first, -of[e], e not in there, -row[e], e))
        assert chosen == sorted(ranked[:top_k], key=lambda e: (-row[e], e))


@given(steps())
def test_a_token_keeps_its_likeliest_expert_and_their_number(step):
    logits, top_k, remapping = step
    chosen = remapping.choose(logits, top_k)
    assert all(len(set(row)) == top_k for row in chosen.tolist())
    assert torch.equal(chosen[:, 0], logits.float().argsort(dim=1, descending=True, stable=True)[:, 0])


@pytest.mark.e2e
@given(steps(), st.randoms())
def test_the_order_of_tokens_changes_nothing(step, random):
    logits, top_k, remapping = step
    order = list(range(len(logits)))
    random.shuffle(order)
    shuffled = remapping.choose(logits[order], top_k)
    assert torch.equal(shuffled, remapping.choose(logits, top_k)[order])


def test_a_row_that_is_no_number_takes_no_part():
    """NaN in one sequence's logits changes no other's choice; its own stays."""
    good = torch.randn(3, 8, generator=torch.Generator().manual_seed(3))
    bad = torch.full((1, 8), torch.nan)
    chosen = Remapping(bins=2).choose(torch.cat((good, bad)), 2)
    for row in chosen.tolist():
        assert len(set(row)) == 2
    # Votes count four tokens instead of three, but these votes order experts alike.
    assert torch.equal(
        chosen[:3], Remapping(bins=2).choose(torch.cat((good, -torch.inf * torch.ones(1, 8))), 2)[:3]
    )


@pytest.mark.parametrize(
    ("alpha", "bins", "option"),
    [(0, 4, "--lynx-alpha"), (-1, 4, "--lynx-alpha"), (math.nan, 4, "--lynx-alpha"), (math.inf, 4, "--lynx-alpha"),
     (2, 0, "--lynx-beta"), (2, 9, "--lynx-beta")],
)  # fmt: skip
def test_values_out_of_range_are_refused(alpha, bins, option):
    with pytest.raises(UserError, match=option):
        Remapping(alpha, bins)


class Remapped(NamedTuple):
    """A router's choice of a step's tokens, and the choice after they agreed in C."""

    logits: torch.Tensor
    alone: tuple[torch.Tensor, torch.Tensor]
    agreed: tuple[torch.Tensor, torch.Tensor]
    counts: list[int]


def in_c(logits: torch.Tensor, top_k: int, remapping: Remapping, form: RouterForm) -> Remapped:
    """edgemoe_remap over the choice that edgemoe_router_topk makes of these logits, bf16."""
    tokens, experts = logits.shape
    # A weight of the logits' columns and one-hot inputs have these logits as their product.
    padded = torch.zeros(experts, 64, dtype=torch.bfloat16)
    padded[:, :tokens] = logits.T
    router = NativeRouter(padded, top_k, form)
    x = torch.eye(64, dtype=torch.bfloat16)[:tokens].contiguous()
    found, chosen, gates = router(x)
    votes, counts = torch.zeros(experts, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    rule = RemappingRule(alpha=remapping.alpha, bins=remapping.bins, popularity=votes.data_ptr())
    before = chosen.clone(), gates.clone()
    native.library().edgemoe_remap(
        *(router.address, ctypes.byref(rule), found.data_ptr(), tokens, router.scores.data_ptr()),
        *(chosen.data_ptr(), gates.data_ptr(), counts.data_ptr()),
    )
    return Remapped(found, before, (chosen, gates), counts.tolist())


def plain_form(*, normalise: bool) -> RouterForm:
    return RouterForm(normalise=normalise, rounded=False)


BIAS = torch.linspace(-0.3, 0.3, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(2))]

PRECISE = {
    "groups, bias, scale": {"sigmoid": True, "bias": BIAS, "groups": 4, "best_groups": 2, "group_best": 2}
    | {"normalise": True, "scale": 2.5},
    "sigmoid": {"sigmoid": True, "scale": 1.5},
    "softmax in groups": {"groups": 4, "best_groups": 2},
    "biased softmax": {"bias": BIAS, "normalise": True},
    "biased product": {"product_bias": BIAS.bfloat16(), "normalise": True, "rounded_product": True},
    "rounded scores": {"sigmoid": True, "bias": BIAS, "normalise": True, "rounded": True}
    | {"rounded_product": True, "rounded_scores": True},
}
"""Routers with a float32 product: DeepSeek-V3's, one without a bias, DeepSeek-V2's, Ernie's, gpt-oss's, LFM2's."""


@needs_native
@pytest.mark.parametrize("fields", PRECISE.values(), ids=PRECISE)
def test_the_kernel_remaps_every_form_of_router(fields):
    """Choice and gate weights are the hook's, by torch's scores; some tokens change, and stay in their groups."""
    form = RouterForm(**{"normalise": False, "rounded": False, "precise": True} | fields)
    logits = torch.randn(12, 16, generator=torch.Generator().manual_seed(5)).bfloat16()
    remapping = Remapping(2, 3)
    got = in_c(logits, 4, remapping, form)
    router = CompiledRouter(SimpleNamespace(weight=logits, top_k=4), form, torch.float32)
    gate = Gate(function="sigmoid" if form.sigmoid else "softmax")
    choice = got.logits, got.alone[1], got.alone[0]
    want = remapped(remapping.choose, gate, router, choice, normalise=form.normalise)
    assert torch.equal(got.agreed[0], want[2])
    rounded = {"rtol": 0.03, "atol": 1e-3} if form.rounded else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(got.agreed[1], want[1], **rounded)
    assert got.counts[1] > 0
    assert len(want[2].unique()) <= len(got.alone[0].unique()) == got.counts[0]
    for before, after in zip(got.alone[0] // 4, got.agreed[0] // 4, strict=True):
        assert form.groups == 1 or set(after.tolist()) <= set(before.tolist())


@needs_native
def test_the_most_tokens_and_bins_count_without_overflow():
    """The likeliest experts of 64 tokens, 32 of each of two, have 32 times 64 to the eighth votes."""
    logits = torch.randn(64, 9, generator=torch.Generator().manual_seed(0)).bfloat16() / 4
    logits[:32, 0], logits[32:, 1] = 4, 4
    remapping = Remapping(4, MOST_BINS)
    want = by_hand(logits.float().tolist(), 3, 4, MOST_BINS)
    assert remapping.choose(logits, 3).tolist() == want
    assert in_c(logits, 3, remapping, plain_form(normalise=True)).agreed[0].tolist() == want


@pytest.mark.e2e
@needs_native
@given(steps(), st.booleans())
def test_the_kernel_chooses_the_same(step, normalise):
    """Experts as in Python; gate weights are parts of a softmax; distinct experts and changed pairs are counted."""
    logits, top_k, remapping = step
    found, (before, _), (chosen, gates), counts = in_c(
        logits, top_k, remapping, plain_form(normalise=normalise)
    )
    assert torch.equal(found, logits)
    assert torch.equal(chosen, remapping.choose(logits, top_k))
    weights = logits.float().softmax(1).gather(1, chosen)
    if normalise:
        weights = weights / weights.sum(1, keepdim=True)
    torch.testing.assert_close(gates, weights, rtol=1e-5, atol=1e-7)
    changed = sum(len(set(new) - set(old)) for old, new in zip(before.tolist(), chosen.tolist(), strict=True))
    assert counts == [len(before.unique()), changed]


@needs_native
def test_the_kernel_leaves_a_row_without_numbers_alone():
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits[2] = torch.nan
    tokens, top_k = 4, 3
    router = NativeRouter(
        torch.zeros(8, 32, dtype=torch.bfloat16), top_k, RouterForm(normalise=True, rounded=False)
    )
    chosen = torch.arange(top_k).repeat(tokens, 1).contiguous()
    gates, counts = torch.full((tokens, top_k), 0.5), torch.zeros(2, dtype=torch.int64)
    votes = torch.zeros(8, dtype=torch.int64)
    rule = RemappingRule(alpha=2.0, bins=4, popularity=votes.data_ptr())
    native.library().edgemoe_remap(
        *(router.address, ctypes.byref(rule), logits.data_ptr(), tokens, router.scores.data_ptr()),
        *(chosen.data_ptr(), gates.data_ptr(), counts.data_ptr()),
    )
    assert (chosen[2].tolist(), gates[2].tolist()) == ([0, 1, 2], [0.5] * 3)
    kept = torch.tensor([0, 1, 3])
    want = Remapping().choose(logits, top_k)
    assert torch.equal(chosen[kept], want[kept])
