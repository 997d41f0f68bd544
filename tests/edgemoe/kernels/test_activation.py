"""edgemoe/kernels/activation.py: names of activations, and their functions against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from edgemoe.kernels.activation import CUSTOM, GATED, Activation, fused_name


def experts_of(activation: str) -> Qwen3MoeExperts:
    """transformers' own experts module with an activation, without weights."""
    with torch.device("meta"):
        return Qwen3MoeExperts(
            Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=4, num_experts=2, hidden_act=activation)
        )


@pytest.mark.parametrize(
    ("hidden_act", "name"),
    [("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh")],
)
@pytest.mark.parametrize("rows", [1, 33])
def test_a_fused_name_is_the_function_of_transformers(hidden_act, name, rows):
    """Where a config's activation has a name, the named function gives the module's numbers, bit for bit."""
    assert fused_name(ACT2FN[hidden_act]) == name
    assert name in GATED
    both = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).mul(5).bfloat16()
    assert torch.equal(Activation.gated(name).apply(both), experts_of(hidden_act)._apply_gate(both))


@pytest.mark.parametrize(
    "hidden_act", ["relu", "quick_gelu", "tanh", "gelu_new", "relu2", "gelu_python", "gelu_python_tanh"]
)
def test_other_activations_are_custom(hidden_act):
    """An activation that no kernel fuses has no name."""
    assert fused_name(ACT2FN[hidden_act]) == CUSTOM


def test_every_fused_name_is_an_activation_of_transformers():
    """The names that edgemoe fuses are keys of transformers' table of activations, with the same functions."""
    x = torch.randn(100, generator=torch.Generator().manual_seed(1))
    names = {hidden_act: fused_name(ACT2FN[hidden_act]) for hidden_act in ACT2FN}
    fused = {hidden_act: name for hidden_act, name in names.items() if name != CUSTOM}
    assert set(fused.values()) == set(GATED)
    for hidden_act, name in fused.items():
        torch.testing.assert_close(GATED[name](x), ACT2FN[hidden_act](x), rtol=0, atol=0)
