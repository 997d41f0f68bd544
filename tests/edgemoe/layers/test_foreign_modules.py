"""Modules of transformers that differ from what most families have: their own gating, routers and arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Moe
from transformers.models.hy_v3.modeling_hy_v3 import HYV3MoE
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2SparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from edgemoe.errors import ModelRefused
from edgemoe.families.traits import TRAITS
from edgemoe.layers.attention import attention
from edgemoe.layers.gating import fused_activation
from edgemoe.layers.router import choose_by_row, next_logits, router_of
from edgemoe.policy.lookahead import predict


@pytest.mark.parametrize("name", ["topk_indices", "sinks", "softcap", "position_bias", "is_causal"])
def test_attention_refuses_an_argument_that_it_does_not_compute_with(name):
    """Sparse attention's index, sinks under another name, or a mask that is not causal never vanish in silence."""
    parts = torch.zeros(3, 1, 2, 4, 16, dtype=torch.bfloat16)
    value = False if name == "is_causal" else torch.zeros(2)
    with pytest.raises(ModelRefused, match=rf"in Module.*the argument {name}"):
        attention(torch.nn.Module(), *parts, None, 1.0, kv=SimpleNamespace(spans=[]), **{name: value})


class _Clamped(Qwen3MoeExperts):
    """Experts whose gating is not their activation's product alone, as in some families of transformers."""

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.clamp(max=0.5).chunk(2, dim=-1)
        return self.act_fn(gate) * up


@pytest.mark.parametrize(("kind", "name"), [(Qwen3MoeExperts, "silu"), (_Clamped, "custom")])
def test_a_gating_of_the_modules_own_is_never_fused(kind, name):
    """Both kinds have silu in their config: the fused product would leave the clamp out."""
    config = AutoConfig.for_model("qwen3_moe", hidden_size=8, moe_intermediate_size=4, num_experts=2)
    assert config.hidden_act == "silu"
    assert fused_activation(kind(config)) == name


SIZES = {"hidden_size": 32, "num_experts_per_tok": 2, "intermediate_size": 16, "moe_intermediate_size": 16}

BLOCKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "minimax_m2": (MiniMaxM2SparseMoeBlock, {"num_local_experts": 8}),
    "hy_v3": (HYV3MoE, {"num_experts": 8}),
    "hunyuan_v1_moe": (HunYuanMoEV1Moe, {"num_experts": 8, "moe_topk": 2, "num_attention_heads": 4}),
}


@pytest.mark.parametrize("model_type", BLOCKS)
def test_look_ahead_predicts_routers_with_arguments_of_their_block(model_type):
    """A router whose bias belongs to its block, or whose weight lies deeper, is predicted by its own choice."""
    kind, sizes = BLOCKS[model_type]
    torch.manual_seed(0)
    block = kind(AutoConfig.for_model(model_type, **SIZES | sizes))
    further = []
    with torch.no_grad():
        for parameter in router_of(block).parameters():
            parameter.normal_()
        if hasattr(block, "e_score_correction_bias"):
            further = [block.e_score_correction_bias.copy_(torch.randn(8) / 4)]
        x = torch.randn(50, 32)
        _, gates, chosen = router_of(block)(x, *further)
        choose_by_row(router_of(block))
        got = predict(next_logits(block, TRAITS["gpt_oss"])(x), 2, decode=True)
    assert got == chosen.gather(1, gates.sort(descending=True).indices).tolist()
    assert len({tuple(sorted(row)) for row in got}) > 5


def test_a_router_that_its_block_cannot_serve_is_refused():
    """An argument without an attribute of its name is named, before any step."""

    class Router(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, weights_of_the_past: torch.Tensor) -> None:
            """Is never called."""

    block = torch.nn.Module()
    block.gate = Router()
    with pytest.raises(ModelRefused, match="weights_of_the_past in Module, for its router Router"):
        next_logits(block, TRAITS["gpt_oss"])
