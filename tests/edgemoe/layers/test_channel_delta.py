"""Kimi Delta Attention: transformers' own results, and the same bits however a sequence is cut."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from availability import needs_native
from torch import nn
from transformers import AutoConfig, DynamicCache
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from edgemoe.kv.linear_state import LinearStates
from edgemoe.kv.shape import LinearState
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.recurrences import ChannelDelta

pytestmark = needs_native

HIDDEN, TOKENS, HEADS, DIM = 64, 40, 3, 24
STATE = LinearState((0,), channels=3 * HEADS * DIM, kernel=4, heads=HEADS, key_dim=DIM, value_dim=DIM)
CASES = {
    "kimi_linear": (KimiLinearDeltaAttention, "kimi_linear", {}),
    "bailing_hybrid": (BailingHybridDeltaAttention, "bailing_hybrid", {"kda_safe_gate": True}),
    "bailing_hybrid, softplus": (BailingHybridDeltaAttention, "bailing_hybrid", {"kda_safe_gate": False}),
}


def module_of(case: str) -> tuple[Any, Any]:
    """transformers' module with weights whose states decay and grow, in bf16, and its config."""
    kind, model_type, changes = CASES[case]
    sizes = {"hidden_size": HIDDEN, "linear_head_dim": DIM, "linear_num_heads": HEADS, "num_hidden_layers": 1}
    config = AutoConfig.for_model(
        model_type, layer_types=["linear_attention"], mlp_layer_types=["dense"], **sizes, **changes
    )
    module = kind(config, 0).bfloat16().eval()
    generator = torch.Generator().manual_seed(1)
    for weight in module.parameters():
        spread = 0.1 if weight.dim() == 2 else 0.4
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * spread)
    module.o_norm.weight.data.add_(1)
    return module, config


def native_of(module: Any) -> ChannelDelta:
    """This program's layer of a copy of a module."""
    own = deepcopy(module)
    for parent in (own, own.forget_gate):
        for name, part in list(parent.named_children()):
            if isinstance(part, nn.Linear):
                setattr(parent, name, DenseLinear(part.weight.data, None, None))
    made = ChannelDelta.try_from(own)
    assert made is not None
    return made


def run(net: ChannelDelta, x: torch.Tensor, ends: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [tokens, H] of a sequence in steps that end at `ends`, and its last state."""
    states, out, start = LinearStates(STATE), [], 0
    with torch.inference_mode():
        for end in ends:
            out.append(net(x[:, start:end], states.of(0, fresh=start == 0)))
            states.commit()
            start = end
    return torch.cat(out, 1)[0], states.of(0, fresh=False).recurrent[0]


@pytest.mark.parametrize("case", CASES)
def test_results_and_states_are_those_of_transformers(case):
    """Decays by softplus and by a sigmoid; in one step, in several, and token by token with the same bits."""
    module, config = module_of(case)
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        want = module(x, cache_params=cache)[0]
    net = native_of(module)
    got, state = run(net, x, [TOKENS])
    assert (got.float() - want.float()).norm() / want.float().norm() < 0.02
    theirs = cache.layers[0].recurrent_states[0]
    assert (state - theirs).norm() / theirs.norm() < 0.02
    for ends in ([3, 4, 23, TOKENS], list(range(1, TOKENS + 1))):
        parts, after = run(net, x, ends)
        assert torch.equal(parts, got)
        assert torch.equal(after, state)
