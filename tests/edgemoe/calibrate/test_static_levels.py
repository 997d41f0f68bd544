"""Static levels: most saved damage first, within the mean, by expert or by layer, with heat or without."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.calibrate.static_levels import static_levels
from edgemoe.policy.damage import Damage
from edgemoe.storage.base import ExpertKey


def damage(
    saved: list[list[float]], choices: list[list[list[int]]], gates: list[list[list[float]]]
) -> Damage:
    """A damage in layers 3, 5, .. that level 8 makes zero, and level 4 `saved`."""
    zero = torch.zeros(len(saved), len(saved[0]))
    four = torch.tensor(saved)
    table = torch.stack((zero, four, 4 * four, 16 * four), -1)
    layers = tuple(range(3, 3 + 2 * len(saved), 2))
    return Damage("text", layers, table, torch.tensor(choices), torch.tensor(gates))


ALIKE = damage([[1.0, 1.0, 1.0, 1.0]], [[[0, 1], [0, 2]]], [[[0.6, 0.3], [0.6, 0.5]]])
"""Four experts that lose the same: 0 was chosen twice, 2 with a larger gate weight than 1, 3 never."""


@pytest.mark.parametrize(
    ("bits", "levels"),
    [(4, (4, 4, 4, 4)), (5, (8, 4, 4, 4)), (6.9, (8, 4, 8, 4)), (7, (8, 8, 8, 4)), (8, (8,) * 4)],
)
def test_bits_go_where_the_sample_says(bits, levels):
    """Use and squared gate weight rank experts that lose the same, and a mean is never exceeded."""
    assert static_levels(ALIKE, {}, bits, by_layer=False) == {3: levels}


def test_heat_goes_before_the_sample():
    """An expert that the sample never chose, and that is hot in use, gets the bits, at its layer's mean gate weight."""
    heat = {ExpertKey(3, 3): 1.0, ExpertKey(3, 1): 0.1, ExpertKey(5, 0): 1.0}
    assert static_levels(ALIKE, heat, 5, by_layer=False) == {3: (4, 4, 4, 8)}
    assert static_levels(ALIKE, heat, 6, by_layer=False) == {3: (4, 8, 4, 8)}


def test_a_layer_is_ranked_by_all_its_experts():
    """One expert of the first layer loses most, all experts of the second together more."""
    chosen = [[[0, 1, 2]]] * 2
    two = damage([[5.0, 0.1, 0.1], [2.0, 2.0, 2.0]], chosen, [[[0.5, 0.5, 0.5]]] * 2)
    assert static_levels(two, {}, 6, by_layer=True) == {3: (4, 4, 4), 5: (8, 8, 8)}
    assert static_levels(two, {}, 5, by_layer=False) == {3: (8, 4, 4), 5: (4, 4, 4)}


@given(st.integers(1, 5), st.integers(1, 6), st.floats(4, 8), st.booleans(), st.integers(0, 1 << 20))
def test_the_mean_is_the_nearest_below(layers, experts, bits, by_layer, seed):
    """One more unit at 8 bits would exceed the mean; no unit at 4 loses more than one at 8."""
    torch.manual_seed(seed)
    saved = torch.rand(layers, experts)
    chosen = torch.arange(experts).expand(layers, 1, -1)
    made = damage(saved.tolist(), chosen.tolist(), torch.ones(layers, 1, experts).tolist())
    levels = torch.tensor(list(static_levels(made, {}, bits, by_layer=by_layer).values()))
    unit = 4 / (layers if by_layer else layers * experts)
    mean = float(levels.float().mean())
    assert bits - unit < mean + 1e-4
    assert mean <= bits + 1e-4
    units = saved.sum(1) if by_layer else saved.flatten()
    given = levels[:, 0] if by_layer else levels.flatten()
    if 0 < int((given == 8).sum()) < len(given):
        assert float(units[given == 8].min()) >= float(units[given == 4].max()) - 1e-6
