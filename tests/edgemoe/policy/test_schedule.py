"""The depth schedule and the levels it gives, against values computed by hand (DyMoE eq. 4-5)."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.policy.schedule import (
    BITS_PER_WEIGHT,
    ERROR_OF_LEVEL,
    by_damage,
    critical,
    price_per_bit,
    retention,
    two_levels,
)


def test_retention_by_hand():
    """r = 0.75 is lambda = 0.5: from 1 through 0.75 to 0.5 over five layers, the cosine in between."""
    got = [retention(layer, 5, 0.75) for layer in range(5)]
    assert got == pytest.approx([1, 0.5 + 0.25 * (1 + 2**-0.5), 0.75, 0.5 + 0.25 * (1 - 2**-0.5), 0.5])
    assert retention(3, 5, 0.75, "equal") == retention(0, 1, 0.75) == 0.75


@given(mean=st.floats(0.5, 1), layers=st.integers(1, 100))
def test_retention_has_its_mean(mean, layers):
    """Over all layers the mean is r, and it never rises with depth."""
    fractions = [retention(layer, layers, mean) for layer in range(layers)]
    assert sum(fractions) / layers == pytest.approx(mean)
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(fractions))


@pytest.mark.parametrize(
    ("fraction", "chosen", "want"),
    [(0.75, 8, 6), (0.76, 8, 7), (1, 8, 8), (0.5, 1, 1), (0.1, 8, 1), (0.3, 10, 3)],
)
def test_critical_rounds_up(fraction, chosen, want):
    """t = ceil(r M), and a rounding error above a whole product does not raise it."""
    assert critical(fraction, chosen) == want


def test_two_levels_by_hand():
    """Of four experts at r = 0.5 the two most important of each row are high."""
    importance = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.7, 0.1, 0.1, 0.1]])
    assert two_levels(importance, 4, 0, 0.5).tolist() == [[0, 4, 4, 0], [4, 4, 0, 0]]
    assert two_levels(importance, 4, 2, 1.0).tolist() == [[4] * 4, [4] * 4]


@given(
    damage=st.lists(st.floats(0, 20), min_size=1, max_size=8),
    price=st.floats(0, 0.1),
    levels=st.sampled_from([(8, 4, 2, 0), (4, 2, 0), (8, 4, 2)]),
)
def test_by_damage_is_the_cheapest_choice(damage, price, levels):
    """No other level costs less, and more damage never gets fewer bits."""
    got = by_damage(torch.tensor([damage]), levels, price)[0].tolist()

    def cost(worth, level):
        return worth * ERROR_OF_LEVEL[level] ** 2 + price * BITS_PER_WEIGHT[level]

    for worth, level in zip(damage, got, strict=True):
        assert cost(worth, level) <= min(cost(worth, other) for other in levels) * (1 + 1e-5) + 1e-9
    ranked = [level for _, level in sorted(zip(damage, got, strict=True))]
    assert ranked == sorted(ranked)


def test_price_by_hand():
    """0 at r = 1; half of the mean in the first layer, one and a half times the mean in the last."""
    assert price_per_bit(3, 9, 1.0) == 0
    first, middle, last = (price_per_bit(layer, 9, 0.75) for layer in (0, 4, 8))
    assert (first, last) == pytest.approx((middle / 2, middle * 1.5))
    assert price_per_bit(0, 9, 0.75, "equal") == pytest.approx(middle)
    assert price_per_bit(4, 9, 0.9) < middle < price_per_bit(4, 9, 0.5)
