"""The depth schedule and the levels it gives, against values computed by hand (DyMoE eq. 4-5)."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.policy.schedule import (
    critical_counts,
    level_at,
    ranked_levels,
    retention,
    threshold_counts,
)


def test_retention_by_hand():
    """r = 0.75 is lambda = 0.5: from 1 through 0.75 to 0.5 over five layers, the cosine in between."""
    got = [retention(layer, 5, 0.75) for layer in range(5)]
    assert got == pytest.approx([1, 0.5 + 0.25 * (1 + 2**-0.5), 0.75, 0.5 + 0.25 * (1 - 2**-0.5), 0.5])
    assert retention(3, 5, 0.75, "equal") == retention(0, 1, 0.75) == 0.75


@given(mean=st.floats(0.01, 1), layers=st.integers(1, 100))
def test_retention_has_its_mean(mean, layers):
    """Over all layers the mean is r, and it never rises with depth."""
    fractions = [retention(layer, layers, mean) for layer in range(layers)]
    assert sum(fractions) / layers == pytest.approx(mean)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(fractions))


def test_a_low_retention_falls_to_nothing():
    """Below r = 0.5 lambda would be negative: r(l) falls from 2 r to 0 along the same cosine."""
    assert [retention(layer, 3, 0.2) for layer in range(3)] == pytest.approx([0.4, 0.2, 0])


@pytest.mark.parametrize(
    ("fraction", "experts", "want"),
    [(0.75, 8, 6), (0.76, 8, 7), (1, 8, 8), (0.5, 1, 1), (0.1, 8, 1), (0.3, 10, 3), (0, 8, 1)],
)
def test_ceil_rounds_up(fraction, experts, want):
    """t = ceil(r M), at least 1, and a rounding error above a whole product does not raise it."""
    assert critical_counts((fraction,), experts, "ceil") == (want,)


def test_carry_by_hand():
    """r(l) M = 1.5, 1.5, 0.9 and 0.5: the half of the first layer goes to the second, 0.9 of the third to the last."""
    assert critical_counts((0.75, 0.75, 0.45, 0.25), 2, "carry") == (1, 2, 1, 1)
    # 0.9 is below 1, so the third layer borrows 0.1 that the fourth lacks: 1.6 - 0.1 rounds down to 1.
    assert critical_counts((0.75, 0.75, 0.45, 0.8), 2, "carry") == (1, 2, 1, 1)


def test_a_model_of_two_experts_a_token():
    """32 layers, top-2, r = 0.75: rounded up all but the last layer keep both, carried three quarters are critical."""
    fractions = [retention(layer, 32, 0.75) for layer in range(32)]
    assert sum(critical_counts(fractions, 2, "ceil")) == 63
    assert sum(critical_counts(fractions, 2, "carry")) == 48


@given(
    fractions=st.lists(st.integers(0, 1000).map(lambda n: Fraction(n, 1000)), min_size=1, max_size=60),
    experts=st.integers(1, 64),
)
def test_counts_in_exact_arithmetic(fractions, experts):
    """In rational numbers: ceil of each product, or the floors of running sums; a layer's 1 is taken from the next."""
    up = critical_counts([float(f) for f in fractions], experts, "ceil")
    assert up == tuple(max(math.ceil(f * experts), 1) for f in fractions)
    given_out, so_far, want = 0, Fraction(0), []
    for fraction in fractions:
        so_far += fraction * experts
        want.append(max(math.floor(so_far - given_out), 1))
        given_out += want[-1]
    got = critical_counts([float(f) for f in fractions], experts, "carry")
    assert got == tuple(want)
    assert all(1 <= count <= experts for count in got)
    if all(f * experts >= 1 for f in fractions):
        assert sum(got) == math.floor(so_far)


def test_two_levels_by_hand():
    """Two of four experts are critical: the two most important of each row are high."""
    importance = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1]])
    assert ranked_levels(importance, (4, 0), (2,)).tolist() == [[0, 4, 4, 0], [4, 4, 0, 0]]
    assert ranked_levels(importance, (4, 2), (4,)).tolist() == [[4] * 4, [4] * 4]


def test_four_levels_by_hand():
    """r = 0.75 of eight experts: 0.75^3, 0.75^2 and 0.75 of them are 3.4, 4.5 and 6, so 4, 5 and 6 rounded up."""
    assert threshold_counts((0.75,), 3, 8, "ceil") == ((4, 5, 6),)
    got = ranked_levels(torch.arange(8.0).unsqueeze(0), (8, 4, 2, 0), (4, 5, 6))
    assert got.tolist() == [[0, 0, 2, 4, 8, 8, 8, 8]]
    assert [level_at(place, (8, 4, 2, 0), (1, 1, 2)) for place in range(4)] == [8, 2, 0, 0]


@given(
    fractions=st.lists(st.floats(0, 1), min_size=1, max_size=40),
    experts=st.integers(1, 16),
    rounding=st.sampled_from(["ceil", "carry"]),
)
def test_thresholds_never_fall(fractions, experts, rounding):
    """The last threshold is eq. 5's own count, and one at a higher level is never above it."""
    got = threshold_counts(fractions, 3, experts, rounding)
    assert tuple(counts[-1] for counts in got) == critical_counts(fractions, experts, rounding)
    assert all(1 <= high <= middle <= low for high, middle, low in got)
    if rounding == "ceil":
        assert [counts[0] for counts in got] == [max(math.ceil(f**3 * experts - 1e-9), 1) for f in fractions]
