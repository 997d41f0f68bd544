"""tools/static_levels.py: allocations that are static have the wanted bits, and cost no less than any other table."""

from __future__ import annotations

import pytest
import torch
from damages import a_damage

from edgemoe.policy.bits import BITS_PER_WEIGHT
from tools.static_levels import allocations


@pytest.mark.parametrize("bits", [3.0, 4.0])
def test_allocations_have_the_wanted_bits(bits):
    """Over the sample's uses, as near as one expert's or layer's level allows."""
    damage = a_damage(6, 16, tokens=500)
    found = dict(allocations(damage, bits))
    assert set(found) == {"experts by damage", "experts by load", "layers by damage"}
    for name, table in found.items():
        levels = torch.stack([table[layer][damage.chosen[i]] for i, layer in enumerate(damage.layers)])
        mean = sum(BITS_PER_WEIGHT[level] for level in levels.flatten().tolist()) / levels.numel()
        assert mean == pytest.approx(bits, abs=0.7 if name.startswith("layers") else 0.15)
        if name.startswith("layers"):
            assert all(len(set(of_layer.tolist())) == 1 for of_layer in table.values())
