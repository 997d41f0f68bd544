"""`eval --study static-levels`: allocations have the wanted bits, and every token the levels of the table."""

from __future__ import annotations

import pytest
import torch
from damages import a_damage

from edgemoe.engine.engine import StoreModel
from edgemoe.evaluate.request import EvalRequest
from edgemoe.evaluate.run import run_eval
from edgemoe.evaluate.static_levels import ALLOCATIONS, allocations
from edgemoe.evaluate.studies import study_arms
from edgemoe.policy.bits import BITS_PER_WEIGHT


@pytest.mark.parametrize("bits", [3.0, 4.0])
def test_allocations_have_the_wanted_bits(bits):
    """Over the sample's uses, as near as one expert's or layer's level allows."""
    damage = a_damage(6, 16, tokens=500)
    found = dict(allocations(damage, bits))
    assert set(found) == {"experts by damage", "experts by load", "layers by damage"}
    for name, table in found.items():
        levels = torch.stack([table[layer][damage.choices[i]] for i, layer in enumerate(damage.layers)])
        mean = sum(BITS_PER_WEIGHT[level] for level in levels.flatten().tolist()) / levels.numel()
        assert mean == pytest.approx(bits, abs=0.7 if name.startswith("layers") else 0.15)
        if name.startswith("layers"):
            assert all(len(set(of_layer.tolist())) == 1 for of_layer in table.values())


@pytest.mark.e2e
def test_a_row_of_each_allocation(damageable, tmp_path):
    """Rows read about the bits that they are named for, between the lowest and the highest level."""
    text = tmp_path / "a.txt"
    text.write_text("a quick fox jumps over dogs " * 60)
    arms = [arm for arm in study_arms("static-levels") if "3.45" in arm.name]
    report = run_eval(StoreModel.open(damageable), EvalRequest(text, None, 256, 64, 0, 0, tuple(arms)))
    assert [row.variation for row in report.rows] == [f"{name}, 3.45 bits" for name in ALLOCATIONS]
    by_expert = [row.bits_per_weight_read for row in report.rows[:2]]
    assert by_expert == pytest.approx([3.45, 3.45], abs=0.8)
    assert all(row.perplexity > 1 for row in report.rows)
