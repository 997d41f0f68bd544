"""The depth schedule and the levels it gives, against values computed by hand (DyMoE eq. 4-5)."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.policy.schedule import (
    critical,
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
