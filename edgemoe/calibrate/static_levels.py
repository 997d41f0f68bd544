"""Levels that never change: more bits for the experts, or the layers, whose errors cost an answer most."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from edgemoe.policy.damage import Damage
from edgemoe.storage.base import LEVELS, ExpertKey

HIGH, LOW = 8, 4
"""The levels that every format of an export has."""


def static_levels(
    damage: Damage, heat: Mapping[ExpertKey, float], bits: float, *, by_layer: bool
) -> dict[int, tuple[int, ...]]:
    """Chooses HIGH where it saves most expected damage, as often as a mean allows, and LOW elsewhere.

    Args:
        damage: the damage of the model, as calibrated.
        heat: expert -> how often it is used, relative to its layer; empty: as often as in the calibration's sample.
        bits: mean of the levels, from LOW to HIGH; the result's mean does not exceed it.
        by_layer: whether all experts of a layer have one level.

    Returns:
        layer -> the level of each of its experts.
    """
    saved = torch.stack([_saved(damage, heat, row, layer) for row, layer in enumerate(damage.layers)])
    units = saved.sum(1) if by_layer else saved.flatten()
    # Above the wanted share by rounding alone, such as 0.1 * 30.
    count = math.floor(len(units) * (bits - LOW) / (HIGH - LOW) + 1e-6)
    levels = torch.full((len(units),), LOW)
    levels[units.argsort(descending=True, stable=True)[:count]] = HIGH
    each = levels.unsqueeze(1).expand_as(saved) if by_layer else levels.view_as(saved)
    return {layer: tuple(row) for layer, row in zip(damage.layers, each.tolist(), strict=True)}


def _saved(damage: Damage, heat: Mapping[ExpertKey, float], row: int, layer: int) -> torch.Tensor:
    """The damage that HIGH saves each expert of a layer, per token: float64 [experts]."""
    low, high = (damage.table[row, :, LEVELS.index(level)].double() for level in (LOW, HIGH))
    experts = len(low)
    chosen, squares = damage.choices[row].flatten(), damage.gates[row].double().square().flatten()
    times = torch.bincount(chosen, minlength=experts).double()
    sums = torch.zeros(experts, dtype=torch.float64).index_add_(0, chosen, squares)
    used = torch.tensor([heat.get(ExpertKey(layer, expert), 0.0) for expert in range(experts)]).double()
    if not used.any():
        return sums / len(damage.choices[row]) * (low - high)
    # An expert that the sample never chose has its layer's mean gate weight.
    square = torch.where(times > 0, sums / times.clamp_min(1), squares.mean())
    rate = used / used.sum() * damage.choices.shape[2]
    return rate * square * (low - high)
