"""edgemoe/kernels/activation.py: gatings are recognised by what they do."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from edgemoe.kernels.activation import NONE, gating_of


def experts_of(activation: str) -> Qwen3MoeExperts:
    with torch.device("meta"):
        return Qwen3MoeExperts(
            Qwen3MoeConfig(hidden_size=8, moe_intermediate_size=4, num_experts=2, hidden_act=activation)
        )


@pytest.mark.parametrize(
    ("activation", "name"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("gelu_new", "gelu_tanh")]
    + [(other, NONE) for other in ("relu", "quick_gelu", "tanh", "xielu")],
)
def test_transformers_own_gatings(activation, name):
    """Of transformers' own experts, whose weights are nowhere, the gating is known, or known not to be fusible."""
    if activation not in ACT2FN:
        pytest.skip("this version of transformers has no such activation")
    assert gating_of(experts_of(activation)._apply_gate) == name


def test_one_that_interleaves_and_clamps_is_left_to_the_model():
    """gpt-oss' gating takes the same rows and gives as many, and is none of ours."""
    experts = GptOssExperts.__new__(GptOssExperts)
    torch.nn.Module.__init__(experts)
    experts.alpha, experts.limit = 1.702, 7.0
    assert gating_of(experts._apply_gate) == NONE


def test_a_function_around_the_gating_is_never_asked():
    """What adds biases to its rows is a function of its own: trying it with other rows would be an error."""

    def biased(both: torch.Tensor) -> torch.Tensor:
        raise AssertionError("asked")

    assert gating_of(biased) == NONE


def test_a_model_is_asked_once_and_not_kept():
    """The answer is remembered as long as the module lives, and no longer."""
    calls = []

    class Experts(torch.nn.Module):
        def _apply_gate(self, both):
            calls.append(both)
            half, up = both.chunk(2, dim=-1)
            return torch.nn.functional.silu(half) * up

    experts = Experts()
    assert [gating_of(experts._apply_gate) for _ in range(3)] == ["silu"] * 3
    assert len(calls) == 1
    gone = weakref.ref(experts)
    del experts
    gc.collect()
    assert gone() is None
