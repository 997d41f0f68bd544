"""Norms with a gate of low rank have the bits of transformers' module."""

from __future__ import annotations

import pytest
import torch
from availability import needs_native
from family_models import small_config
from torch import nn
from transformers.models.axk2.modeling_axk2 import AXK2GatedRMSNorm

from edgemoe.layers.dense import DenseLinear, DenseNorm
from edgemoe.layers.gated_norm import GatedNorm

pytestmark = needs_native


@pytest.fixture
def module() -> nn.Module:
    """transformers' module with this program's norm and layers, in bf16."""
    torch.manual_seed(3)
    theirs = AXK2GatedRMSNorm(small_config("axk2")).to(torch.bfloat16).eval()
    theirs.norm.weight.data.add_(torch.randn(64).bfloat16() * 0.1)
    theirs.norm = DenseNorm.try_from(theirs.norm)
    for name in ("fc1", "fc2"):
        linear = getattr(theirs.mlp, name)
        setattr(theirs.mlp, name, DenseLinear(linear.weight.data.mul_(20), None, None))
    return theirs


def test_the_gate_is_of_the_normed_state(module):
    """Any number of rows has the module's bits; the gate is not 1."""
    own = GatedNorm.try_from(module)
    x = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        assert torch.equal(own(x), module(x))
        assert not torch.equal(own(x), module.norm(x))


def test_another_formula_stays_a_module(module):
    """A gate by another function, or of layers that are not this program's, is not taken."""
    module.mlp.activation_fn = nn.ReLU()
    assert GatedNorm.try_from(module) is None
    module.mlp.activation_fn, module.mlp.fc1 = nn.SiLU(), nn.Linear(64, 8)
    assert GatedNorm.try_from(module) is None
    assert GatedNorm.try_from(module.norm) is None
