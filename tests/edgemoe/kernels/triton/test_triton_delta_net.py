"""One new token of a gated delta net by Triton's kernel, against transformers' module."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu
from torch import nn
from transformers import AutoConfig, DynamicCache
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from edgemoe.kernels.triton import dense
from edgemoe.kernels.triton.experts import INTERPRETED
from edgemoe.kv.linear_state import LinearStates
from edgemoe.kv.shape import LinearState
from edgemoe.layers import device_delta_net
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.device_delta_net import DeviceDeltaNet

pytestmark = [pytest.mark.triton, pytest.mark.gpu, NEEDS_TRITON]

CLASSES = {"qwen3_next": Qwen3NextGatedDeltaNet, "qwen3_5_moe_text": Qwen3_5MoeGatedDeltaNet}
HIDDEN, PROMPT, TOKENS = 64, 9, 11
SIZES = {"key_heads": 2, "value_heads": 4, "key_head_dim": 24, "value_head_dim": 40}
STATE = LinearState((0,), channels=2 * 2 * 24 + 4 * 40, kernel=4, heads=4, key_dim=24, value_dim=40)


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    round_like_a_gpu(monkeypatch)
    monkeypatch.setattr(device_delta_net, "triton_runs", lambda place: True)  # the interpreter's is the CPU
    if INTERPRETED:  # its time goes by programs
        monkeypatch.setattr(dense, "ROWS", 64)
        monkeypatch.setattr(dense, "COLS", 64)


@cache
def config_of(model_type: str) -> Any:
    return AutoConfig.for_model(
        model_type,
        hidden_size=HIDDEN,
        layer_types=["linear_attention"],
        num_hidden_layers=1,
        **{f"linear_{'num_' if 'heads' in name else ''}{name}": size for name, size in SIZES.items()},
    )


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
    return module.to(DEVICE)


def own_of(module: Any, quantized: tuple[str, ...] = ()) -> DeviceDeltaNet | None:
    """This program's layer of a copy of a module, of which the named projections have 8 bits."""
    own = deepcopy(module)
    for name, part in list(own.named_children()):
        if isinstance(part, nn.Linear):
            weight, scale = part.weight.data, None
            if name in quantized:
                weight, scale = in_eight_bits(weight)
            setattr(own, name, DenseLinear(weight, scale, None))
    return DeviceDeltaNet.try_from(own)


def in_eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and scales, powers of two: their products are bf16 numbers."""
    scale = (weight.float().abs().amax(1) / 127).log2().ceil().exp2()
    return (weight.float() / scale[:, None]).round().to(torch.int8), scale.bfloat16()


def run(net: Any, x: torch.Tensor, ends: list[int]) -> tuple[torch.Tensor, LinearStates]:
    """Results [tokens, H] of a sequence in steps that end at `ends`, and its states."""
    states, out, start = LinearStates(STATE, DEVICE), [], 0
    with torch.inference_mode():
        for end in ends:
            out.append(net(hidden_states=x[:, start:end], cache_params=states.of(0, fresh=start == 0)))
            states.commit()
            start = end
    return torch.cat(out, 1)[0], states


def rows(seed: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


@pytest.mark.parametrize(
    ("model_type", "wide_norm"), [("qwen3_next", False), ("qwen3_5_moe_text", True)], ids=["bf16", "float32"]
)
def test_new_tokens_continue_a_prompt_as_in_transformers(model_type, wide_norm):
    """Results and states of a prompt, which transformers' module computes by chunks, and of tokens after it."""
    module, x = module_of(model_type, wide_norm), rows()
    cached = DynamicCache(config=config_of(model_type))
    with torch.inference_mode():
        want = [module(x[:, :PROMPT], cache_params=cached)]
        want += [module(x[:, i : i + 1], cache_params=cached) for i in range(PROMPT, TOKENS)]
    net = own_of(module)
    result, states = run(net, x, [PROMPT, *range(PROMPT + 1, TOKENS + 1)])
    whole = torch.cat(want, 1)[0].float()
    assert (result.float() - whole).norm() < 0.004 * whole.norm()
    conv, recurrent = (each[states.valid] for each in states.copies(0))
    assert (conv - cached.layers[0].conv_states[0]).abs().max() < 0.02
    theirs = cached.layers[0].recurrent_states[0]
    assert (recurrent - theirs).norm() < 1e-3 * theirs.norm()


def test_a_first_token_begins_its_state():
    """A sequence without tokens, in memory that holds something else; 8-bit projections give what torch does."""
    exact, x = deepcopy(module_of("qwen3_5_moe_text", False)), rows(3, 1)
    net = own_of(exact, ("in_proj_qkv", "in_proj_b"))
    for name in ("in_proj_qkv", "in_proj_b"):
        weight, scale = in_eight_bits(getattr(exact, name).weight.data)
        getattr(exact, name).weight.data = weight * scale[:, None]
    states = LinearStates(STATE, DEVICE)
    for each in states.copies(0):
        each.fill_(torch.nan)
    with torch.inference_mode():
        result = net(hidden_states=x, cache_params=states.of(0, fresh=True))
        want, theirs = run(exact, x, [1])
    states.commit()
    assert (result[0].float() - want.float()).norm() < 0.006 * want.float().norm()
    for mine, other in zip(states.copies(0), theirs.copies(0), strict=True):
        mine, other = mine[states.valid].float(), other[theirs.valid].float()
        assert (mine - other).norm() <= 0.006 * other.norm()


def test_a_step_that_fails_can_run_again():
    """The kernel leaves the state before the token as it is."""
    net, x = own_of(module_of("qwen3_next", False)), rows(4, 5)
    _, states = run(net, x, [4])
    before = [each[states.valid].clone() for each in states.copies(0)]
    with torch.inference_mode():
        first = net(hidden_states=x[:, 4:], cache_params=states.of(0, fresh=False))
        again = net(hidden_states=x[:, 4:], cache_params=states.of(0, fresh=False))
    assert torch.equal(first, again)
    after = [each[states.valid] for each in states.copies(0)]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_prompt_may_come_in_blocks():
    """Results and states of a prompt, of its blocks in one step, and of steps one after another."""
    net, x = own_of(module_of("qwen3_5_moe_text", False)), rows(6, 6)
    want, theirs = run(net, x, [6])
    result, states = run(net, x, [2, 6])
    blocks = LinearStates(STATE, DEVICE)
    with torch.inference_mode():
        parts = [net(hidden_states=x[:, :4], cache_params=blocks.of(0, fresh=True))]
        parts.append(net(hidden_states=x[:, 4:], cache_params=blocks.of(0, fresh=False, continued=True)))
    blocks.commit()
    for made, own in ((result, states), (torch.cat(parts, 1)[0], blocks)):
        assert (made.float() - want.float()).norm() < 0.004 * want.float().norm()
        for mine, other in zip(own.copies(0), theirs.copies(0), strict=True):
            mine, other = mine[own.valid].float(), other[theirs.valid].float()
            assert (mine - other).norm() < 0.004 * other.norm()


def test_a_single_row_after_a_block_continues_in_place():
    """The last block of a prompt may be one row, whose state before it lies where the one after it goes."""
    net, x = own_of(module_of("qwen3_next", False)), rows(5, 4)
    want, theirs = run(module_of("qwen3_next", False), x, [4])
    states = LinearStates(STATE, DEVICE)
    with torch.inference_mode():
        net(hidden_states=x[:, :3], cache_params=states.of(0, fresh=True))
        last = net(hidden_states=x[:, 3:], cache_params=states.of(0, fresh=False, continued=True))
    states.commit()
    assert (last[0].float() - want[3:].float()).norm() < 0.006 * want[3:].float().norm()
    mine, other = states.copies(0)[0][states.valid], theirs.copies(0)[0][theirs.valid]
    assert (mine - other).abs().max() < 0.02


def test_other_modules_are_left_to_transformers(monkeypatch):
    """Convolutions with a bias, projections that are not this program's, and places without Triton."""
    module = module_of("qwen3_next", False)
    assert DeviceDeltaNet.try_from(nn.Linear(2, 2)) is None
    assert DeviceDeltaNet.try_from(module) is None
    biased = deepcopy(module)
    biased.conv1d.bias = nn.Parameter(torch.zeros(len(biased.conv1d.weight)))
    assert own_of(biased) is None
    monkeypatch.setattr(device_delta_net, "triton_runs", lambda place: False)
    assert own_of(module) is None
