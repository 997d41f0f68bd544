"""The choice by damage and price against every other choice, and prices that give the wanted bits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from damages import a_damage, random_gates
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.errors import UserError
from edgemoe.policy.bits import BITS_PER_WEIGHT, bits_of_retention
from edgemoe.policy.damage import PriceCurve, cheapest
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import LEVELS

FOUR = (8, 4, 2, 0)
LISTS = [FOUR, (4, 2, 0), (8, 4, 2), (4, 2), (8, 0)]


def cost(damage: np.ndarray, levels: tuple[int, ...], price: float) -> float:
    """The cost of a choice of columns, in float64."""
    bits = [BITS_PER_WEIGHT[LEVELS[column]] for column in levels]
    return sum(damage[i, column] + price * b for i, (column, b) in enumerate(zip(levels, bits, strict=True)))


@given(
    damage=st.lists(st.lists(st.floats(0, 20), min_size=4, max_size=4), min_size=1, max_size=3),
    price=st.floats(0, 3),
    levels=st.sampled_from(LISTS),
)
def test_the_choice_costs_less_than_every_other(damage, price, levels):
    """Of all choices for up to three experts together, in numpy and float64, none costs less."""
    table = np.array(damage)
    columns = [LEVELS.index(level) for level in levels]
    got = cheapest(torch.tensor(table[:, columns], dtype=torch.float32), levels, price)
    least = min(cost(table, each, price) for each in itertools.product(columns, repeat=len(table)))
    ours = cost(table, tuple(LEVELS.index(level) for level in got.tolist()), price)
    assert ours <= least * (1 + 1e-5) + 1e-5


def test_levels_by_hand():
    """Gate weights .8 and .2: .64 and .04 times the errors, and a price of .01 a bit."""
    damage = a_damage(1, 2, 2)
    damage.table[:] = torch.tensor([[[0, 0.01, 0.1, 1.0], [0, 0.01, 0.1, 0.4]]])
    # .64: 8 costs .085, 4 .0064 + .045, 2 .064 + .025, 0 .64. .04: 2 costs .004 + .025, 0 .016.
    gates, chosen = torch.tensor([[0.8, 0.2]]), torch.tensor([[0, 1]])
    lost = gates.square().unsqueeze(-1) * damage.of_layer(0, FOUR)[chosen]
    assert cheapest(lost, FOUR, 0.01).tolist() == [[4, 0]]
    assert cheapest(lost, FOUR, 0.0).tolist() == [[8, 8]]


def mean_bits(levels: torch.Tensor) -> float:
    return float(torch.tensor([BITS_PER_WEIGHT[level] for level in levels.flatten().tolist()]).mean())


@pytest.mark.e2e
@pytest.mark.parametrize("levels", LISTS)
@pytest.mark.parametrize("fraction", [0.3, 0.6, 0.9])
def test_price_gives_the_wanted_bits_on_other_tokens(levels, fraction):
    """In decode, on tokens that the price was not solved on, the mean is within 2 %."""
    low, high = BITS_PER_WEIGHT[levels[-1]], BITS_PER_WEIGHT[levels[0]]
    bits = round(low + fraction * (high - low), 2)
    policy = LevelPolicy(
        RunSettings(levels=levels, bits=bits), range(3), experts=16, damage=a_damage(3, 16, tokens=2000)
    )
    got = []
    for layer in range(3):
        chosen, gates = random_gates(4, 7000 + layer, 2000)
        got.append(mean_bits(policy.levels(layer, chosen, gates, None, decode=True)))
    assert sum(got) / 3 == pytest.approx(bits, rel=0.02)


@pytest.mark.parametrize("tokens", [9, 64, 100, 512])
def test_price_of_a_prompt_gives_the_wanted_bits(tokens):
    """In prefill the mean over the experts of a prompt of other tokens is within 5 %, at every length."""
    damage = a_damage(4, 64, tokens=1024)
    policy = LevelPolicy(RunSettings(levels=FOUR, bits=3.5), range(4), experts=64, damage=damage)
    got = []
    for layer in range(4):
        for prompt in range(6):
            chosen, gates = random_gates(4, 9000 + 10 * prompt + layer, tokens, 64)
            levels = policy.levels(layer, chosen, gates, None, decode=False)
            of = dict(zip(chosen.flatten().tolist(), levels.flatten().tolist(), strict=True))
            got.append(mean_bits(torch.tensor([*of.values()])))
    assert sum(got) / len(got) == pytest.approx(3.5, rel=0.05)


def test_a_prompt_sums_its_tokens():
    """Two tokens of .5 count as a squared weight of .5: every expert has one level, by its sum."""
    damage = a_damage(1, 4, 2)
    policy = LevelPolicy(RunSettings(levels=FOUR, bits=3.5), range(1), experts=4, damage=damage)
    chosen = torch.tensor([[0, 1], [0, 2], [0, 3]])
    gates = torch.tensor([[0.5, 0.5], [0.7, 0.3], [0.9, 0.1]])
    price = damage.price(FOUR, 3.5, 3)
    summed = torch.tensor([0.25 + 0.49 + 0.81, 0.25, 0.09, 0.01])
    want = cheapest(summed[:, None] * damage.table[0], FOUR, price)
    assert torch.equal(policy.levels(0, chosen, gates, None, decode=False), want[chosen])


def test_extreme_bits():
    """The highest level's bits need no price; fewer bits than a sample can have give the lowest level everywhere."""
    damage = a_damage(1, 8).table[0]
    assert PriceCurve(damage, FOUR).price(8.5) == 0
    price = PriceCurve(damage, FOUR).price(1e-6)
    assert set(cheapest(damage, FOUR, price).tolist()) == {0}
    assert PriceCurve(torch.zeros(5, 4), FOUR).price(3.5) == 0


@given(st.integers(0, 2**32 - 1), st.sampled_from(LISTS), st.floats(-8, 2))
def test_a_curve_counts_what_is_chosen(seed, levels, exponent):
    """At any price the curve's bits are the mean bits of the levels that the rule chooses, also of odd damages."""
    rows = torch.rand(200, len(levels), generator=torch.Generator().manual_seed(seed)) ** 4
    price = 10.0**exponent
    assert PriceCurve(rows, levels).bits(price) == pytest.approx(
        mean_bits(cheapest(rows, levels, price)), abs=0.05
    )


def test_price_rises_with_a_prompt():
    """More tokens weigh more, so a bit must cost more; between powers of two it is the geometric mean by length."""
    damage = a_damage(2, 16)
    found = [damage.price(FOUR, 3.5, tokens) for tokens in (16, 32, 64, 128)]
    assert found == sorted(found)
    middle = math.exp((math.log(found[0]) + math.log(found[1])) / 2)
    assert damage.price(FOUR, 3.5, 23) == pytest.approx(middle, rel=0.05)


@pytest.mark.parametrize(
    ("retention", "levels", "bits"),
    [
        (1, FOUR, 8.5),
        (1, (4, 2, 0), 4.5),
        (0.9, FOUR, 3.9),
        (0.75, FOUR, 3.5),
        (0.5, (8, 4, 2), 3.2),
        (0.825, FOUR, 3.7),
    ],
)
def test_retention_stands_for_bits(retention, levels, bits):
    """As the decision has them, and on a straight line between."""
    assert bits_of_retention(retention, levels) == pytest.approx(bits)
    assert RunSettings(levels=levels, retention=retention).mean_bits == pytest.approx(bits)


@pytest.mark.parametrize(
    ("levels", "bits"), [((4, 2), 2.5), ((4, 2), 5.0), ((4,), 4.0), (FOUR, 0.0), (FOUR, 9.0)]
)
def test_bits_out_of_range_are_refused(levels, bits):
    with pytest.raises(UserError, match="mean bits per weight above"):
        RunSettings(levels=levels, bits=bits)


def test_damage_is_required():
    with pytest.raises(ValueError, match="expected the damage of each level for 8/4/2/0"):
        LevelPolicy(RunSettings(levels=FOUR), layers=range(1), experts=2)
