"""edgemoe.policy.lookahead: the experts of DyMoE's equations 6 to 8, in order."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from edgemoe.policy.lookahead import predict


def case(tokens: int, experts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, 16, generator=generator), torch.randn(experts, 16, generator=generator)


def scores_of(hidden: torch.Tensor, gate: torch.Tensor) -> list[list[float]]:
    """Equation 6, one row and one expert at a time, in float64."""
    rows = []
    for h in hidden.double():
        exponentials = [torch.exp(h @ w) for w in gate.double()]
        rows.append([float(e / sum(exponentials)) for e in exponentials])
    return rows


def top(row: list[float], k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda e: -row[e])[:k]


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(2, 9), st.data(), st.integers(0, 999))
def test_prefill_orders_by_frequency(tokens: int, experts: int, data: st.DataObject, seed: int) -> None:
    """Exactly the experts in some token's top k, by the number of such tokens (eq. 7), then by mean score."""
    k = data.draw(st.integers(1, experts))
    hidden, gate = case(tokens, experts, seed)
    rows = scores_of(hidden, gate)
    counts = Counter(expert for row in rows for expert in top(row, k))
    expected = sorted(counts, key=lambda e: (-counts[e], -sum(row[e] for row in rows)))
    assert predict(F.linear(hidden, gate), k, decode=False) == [expected]


@settings(max_examples=40)
@given(st.integers(1, 5), st.integers(2, 9), st.data(), st.integers(0, 999))
def test_decode_orders_each_row_by_score(tokens: int, experts: int, data: st.DataObject, seed: int) -> None:
    """The top k experts of every sequence's token, a list each, by that token's scores (eq. 8)."""
    k = data.draw(st.integers(1, experts))
    hidden, gate = case(tokens, experts, seed)
    expected = [top(row, k) for row in scores_of(hidden, gate)]
    assert predict(F.linear(hidden, gate), k, decode=True) == expected


def test_an_example_by_hand() -> None:
    """Three tokens choose 2 of 4 experts: 1 thrice, 3 twice, 0 once, 2 never; in decode each has its own."""
    gate = torch.eye(4)
    hidden = torch.tensor([[0.0, 2, 0, 1], [0, 1, 0, 2], [9, 3, 0, 0]])
    assert predict(F.linear(hidden, gate), 2, decode=False) == [[1, 3, 0]]
    assert predict(F.linear(hidden, gate), 2, decode=True) == [[1, 3], [3, 1], [0, 1]]


def test_frequency_outweighs_any_score() -> None:
    """An expert chosen by two tokens precedes one chosen by a single token, at any scores."""
    hidden = torch.tensor([[100.0, 0.0], [0.0, 0.1], [0.0, 0.1]])
    assert predict(F.linear(hidden, torch.eye(2)), 1, decode=False) == [[1, 0]]


@pytest.mark.parametrize("decode", [False, True])
def test_bf16_logits_are_accepted(decode: bool) -> None:
    """bfloat16 hidden states and gates give Python integers, each expert once."""
    hidden, gate = case(7, 8, 0)
    for experts in predict(F.linear(hidden.bfloat16(), gate.bfloat16()), 2, decode=decode):
        assert len(set(experts)) == len(experts) >= 2
        assert all(type(expert) is int and 0 <= expert < 8 for expert in experts)
