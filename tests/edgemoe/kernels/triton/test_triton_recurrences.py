"""One new token of layers with a state by Triton's kernels, against transformers' modules."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from family_models import small_config
from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu
from torch import nn
from transformers import AutoConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeShortConv
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from edgemoe.kernels.triton import dense
from edgemoe.kernels.triton.experts import INTERPRETED
from edgemoe.kv.linear_state import LinearStates
from edgemoe.kv.shape import LinearState
from edgemoe.layers import device_recurrences
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.device_modules import recurrent_on_device
from edgemoe.layers.device_recurrences import DeviceChannelDelta, DeviceShortConvolution, DeviceStateSpace

pytestmark = [pytest.mark.triton, pytest.mark.gpu, NEEDS_TRITON]

PROMPT, TOKENS = 6, 7
CASES = {
    "lfm2_moe": (Lfm2MoeShortConv, DeviceShortConvolution),
    "lfm2_moe, biases": (Lfm2MoeShortConv, DeviceShortConvolution),
    "nemotron_h": (NemotronHMamba2Mixer, DeviceStateSpace),
    "granitemoehybrid": (GraniteMoeHybridMambaLayer, DeviceStateSpace),
    "kimi_linear": (KimiLinearDeltaAttention, DeviceChannelDelta),
    "bailing_hybrid": (BailingHybridDeltaAttention, DeviceChannelDelta),
    "bailing_hybrid, softplus": (BailingHybridDeltaAttention, DeviceChannelDelta),
}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    round_like_a_gpu(monkeypatch)
    monkeypatch.setattr(device_recurrences, "triton_runs", lambda place: True)  # the interpreter's is the CPU
    if INTERPRETED:  # its time goes by programs
        monkeypatch.setattr(dense, "ROWS", 64)
        monkeypatch.setattr(dense, "COLS", 64)


def config_of(case: str) -> Any:
    model_type = case.partition(",")[0]
    if model_type in ("nemotron_h", "granitemoehybrid"):
        config = small_config(model_type)
        if model_type == "granitemoehybrid":
            config.time_step_limit = (0.1, 0.9)
        return config
    if model_type == "lfm2_moe":
        sizes = {"hidden_size": 200, "conv_bias": "biases" in case, "num_attention_heads": 4}
        return AutoConfig.for_model(model_type, layer_types=["conv"], num_hidden_layers=1, **sizes)
    sizes = {"hidden_size": 64, "linear_head_dim": 24, "linear_num_heads": 3, "num_hidden_layers": 1}
    safe = {"kda_safe_gate": "softplus" not in case} if model_type == "bailing_hybrid" else {}
    types = {"layer_types": ["linear_attention"], "mlp_layer_types": ["dense"]}
    return AutoConfig.for_model(model_type, **types, **sizes, **safe)


def module_of(case: str) -> Any:
    """transformers' module with weights whose states decay and grow, all bf16, and this program's linear layers."""
    module = CASES[case][0](config_of(case), 0).bfloat16().eval()
    generator = torch.Generator().manual_seed(1)
    for name, weight in module.named_parameters():
        spread = 0.1 if weight.dim() == 2 else 0.4
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * spread)
        if name in ("D", "norm.weight", "o_norm.weight"):
            weight.data.add_(1)
    module = module.to(DEVICE)
    for parent in (module, getattr(module, "forget_gate", nn.Module())):
        for name, part in list(parent.named_children()):
            if isinstance(part, nn.Linear):
                bias = None if part.bias is None else part.bias.data
                setattr(parent, name, DenseLinear(part.weight.data, None, bias))
    return module


def states_of(module: Any) -> LinearStates:
    """The empty states of a sequence, full of numbers that must not be read."""
    if hasattr(module, "conv"):
        shape = LinearState((0,), *module.conv.weight.shape[::2], 0, 0, 0)
    else:
        conv = module.conv1d.weight.shape[::2]
        last = getattr(module, "ssm_state_size", module.head_dim)
        shape = LinearState((0,), *conv, module.num_heads, module.head_dim, last)
    states = LinearStates(shape, DEVICE)
    for each in states.copies(0):
        each.fill_(torch.nan)
    return states


def run(net: Any, module: Any, x: torch.Tensor, ends: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Results [tokens, H] of a sequence in steps that end at `ends`, and its last state."""
    states, out, start = states_of(module), [], 0
    name = "past_key_values" if hasattr(module, "conv") else "cache_params"
    with torch.inference_mode():
        for end in ends:
            out.append(net(hidden_states=x[:, start:end], **{name: states.of(0, fresh=start == 0)}))
            states.commit()
            start = end
    return torch.cat(out, 1)[0], [each[states.valid].float() for each in states.copies(0)]


def near(result: torch.Tensor, want: torch.Tensor, error: float) -> bool:
    return bool((result.float() - want.float()).norm() <= error * want.float().norm())


@pytest.mark.parametrize("case", CASES)
def test_new_tokens_are_transformers(case):
    """Results and states of tokens that continue a prompt, and of a first token, which begins its state."""
    module = module_of(case)
    net = recurrent_on_device(module)
    assert type(net) is CASES[case][1]
    hidden = 200 if hasattr(module, "conv") else 64
    x = torch.randn(1, TOKENS, hidden, generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)
    for ends in ([PROMPT, *range(PROMPT + 1, TOKENS + 1)], [1]):
        # For a single token transformers leaves out the limits of a step; in a prompt it has them.
        their_ends = ends[-1:] if case == "granitemoehybrid" else ends
        want, theirs = run(module, module, x, their_ends)
        result, states = run(net, module, x, ends)
        # transformers rounds a state space's state to bf16 for its result.
        assert near(result, want, 0.015)
        assert all(near(mine, other, 0.01) for mine, other in zip(states, theirs, strict=True))


@pytest.mark.parametrize("case", ["lfm2_moe", "nemotron_h", "kimi_linear"])
def test_a_step_leaves_the_state_before_it(case):
    """A step that fails can run again, with the same bits."""
    module = module_of(case)
    net, states = recurrent_on_device(module), states_of(module)
    for each in states.copies(0):
        each.fill_(0.5)
    name = "past_key_values" if hasattr(module, "conv") else "cache_params"
    x = torch.full((1, 1, 200 if hasattr(module, "conv") else 64), 0.3).bfloat16().to(DEVICE)
    with torch.inference_mode():
        first, again = (net(hidden_states=x, **{name: states.of(0, fresh=False)}) for _ in range(2))
    assert torch.equal(first, again)
    assert all(bool((each[states.valid] == 0.5).all()) for each in states.copies(0))


@pytest.mark.parametrize("case", ["lfm2_moe", "nemotron_h", "kimi_linear"])
def test_modules_without_kernels_stay_transformers(case, monkeypatch):
    """Linear layers that are not this program's, and places without Triton."""
    module = module_of(case)
    other = deepcopy(module)
    name = "b_proj" if case == "kimi_linear" else "in_proj"
    setattr(other, name, nn.Linear(4, getattr(module, name).out_features))
    assert recurrent_on_device(other) is None
    monkeypatch.setattr(device_recurrences, "triton_runs", lambda place: False)
    assert recurrent_on_device(module) is None
