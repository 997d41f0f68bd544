"""Gated delta nets: transformers' own results, and the same bits however a sequence is cut."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from availability import needs_native
from torch import nn
from transformers import AutoConfig, DynamicCache
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from edgemoe.kernels.native.delta_net import DeltaState
from edgemoe.kv.linear_state import LinearStates
from edgemoe.kv.shape import LinearState
from edgemoe.layers.delta_net import GatedDeltaNet
from edgemoe.layers.dense import DenseLinear

pytestmark = needs_native

CLASSES = {"qwen3_next": Qwen3NextGatedDeltaNet, "qwen3_5_moe_text": Qwen3_5MoeGatedDeltaNet}
HIDDEN, TOKENS = 64, 40
STATE = LinearState((0,), channels=2 * 2 * 24 + 4 * 40, kernel=4, heads=4, key_dim=24, value_dim=40)
"""Two heads of keys and four of values, whose columns vectors do not divide."""


@cache
def module_of(model_type: str, wide_norm: bool) -> Any:
    """transformers' module with weights whose states decay and grow, all bf16; perhaps a float32 norm."""
    module = CLASSES[model_type](config_of(model_type), 0).bfloat16().eval()
    generator = torch.Generator().manual_seed(1)
    for weight in module.parameters():
        spread = 0.1 if weight.dim() == 2 else 0.4
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * spread)
    module.norm.weight.data.add_(1)
    if wide_norm:
        module.norm.weight.data = module.norm.weight.data.float() * 1.003
    return module


@cache
def config_of(model_type: str) -> Any:
    sizes = {"key_heads": 2, "value_heads": 4, "key_head_dim": 24, "value_head_dim": 40}
    return AutoConfig.for_model(
        model_type,
        hidden_size=HIDDEN,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
        **{f"linear_{'num_' if 'heads' in name else ''}{name}": size for name, size in sizes.items()},
    )


def native_of(module: Any) -> GatedDeltaNet:
    """This program's layer of a copy of a module."""
    own = deepcopy(module)
    for name, part in list(own.named_children()):
        if isinstance(part, nn.Linear):
            setattr(own, name, DenseLinear(part.weight.data, None, None))
    made = GatedDeltaNet.try_from(own)
    assert made is not None
    return made


def run(net: GatedDeltaNet, x: torch.Tensor, ends: list[int]) -> tuple[torch.Tensor, LinearStates]:
    """Results [tokens, H] of a sequence in steps that end at `ends`, and its states."""
    states, out, start = LinearStates(STATE), [], 0
    with torch.inference_mode():
        for end in ends:
            out.append(net(x[:, start:end], states.of(0, fresh=start == 0)))
            states.commit()
            start = end
    return torch.cat(out, 1)[0], states


@pytest.mark.parametrize("model_type", CLASSES)
@pytest.mark.parametrize("wide_norm", [False, True], ids=["bf16", "float32"])
def test_a_gated_delta_net_is_transformers(model_type, wide_norm):
    """A prompt, and new tokens after it, differ from transformers' own by the order of additions alone."""
    module = module_of(model_type, wide_norm)
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    own = DynamicCache(config=config_of(model_type))
    with torch.inference_mode():
        want = [module(x[:, :30], cache_params=own)]
        want += [module(x[:, i : i + 1], cache_params=own) for i in range(30, TOKENS)]
    got, _ = run(native_of(module), x, [30, *range(31, TOKENS + 1)])
    whole = torch.cat(want, 1)[0].float()
    assert (got.float() - whole).norm() < 0.004 * whole.norm()
    assert (got.float() - whole)[30:].norm() < 0.004 * whole[30:].norm()


@pytest.mark.parametrize("model_type", CLASSES)
def test_a_sequence_has_the_same_bits_in_parts(model_type):
    """Results and both parts of the state, in one step, in several, and token by token."""
    net = native_of(module_of(model_type, False))
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    want, states = run(net, x, [TOKENS])
    for ends in ([2, 19, TOKENS], list(range(1, TOKENS + 1))):
        got, others = run(net, x, ends)
        assert torch.equal(got, want)
        for mine, theirs in zip(others.copies(0), states.copies(0), strict=True):
            assert torch.equal(mine[others.valid], theirs[states.valid])


def test_a_step_leaves_the_copy_that_it_has_read():
    """So that a step that fails can be made again."""
    net = native_of(module_of("qwen3_next", False))
    x = torch.randn(1, 8, HIDDEN, generator=torch.Generator().manual_seed(4)).bfloat16()
    _, states = run(net, x, [8])
    before = [each[states.valid].clone() for each in states.copies(0)]
    with torch.inference_mode():
        first = net(x[:, :3], states.of(0, fresh=False))
        assert torch.equal(net(x[:, :3], states.of(0, fresh=False)), first)
    assert all(
        torch.equal(each[states.valid], old) for each, old in zip(states.copies(0), before, strict=True)
    )


def test_other_sizes_are_refused():
    """Rows and states that C would read beyond."""
    net = native_of(module_of("qwen3_next", False)).native
    conv, recurrent = (each[0, 0] for each in LinearStates(STATE).copies(0))
    rows = torch.zeros(3, net.reads).bfloat16()
    for wrong in (
        (rows[:, 1:].contiguous(), DeltaState((conv, recurrent), (conv, recurrent))),
        (rows, DeltaState(None, (conv[1:], recurrent))),
        (rows, DeltaState((conv, recurrent[1:]), (conv, recurrent))),
    ):
        with pytest.raises(ValueError, match=f"rows of {net.reads}"):
            net(*wrong)
