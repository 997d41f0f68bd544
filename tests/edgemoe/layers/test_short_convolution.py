"""Gated short convolutions: transformers' own results, and the same bits however a sequence is cut."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from availability import needs_native
from transformers import AutoConfig, DynamicCache
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeShortConv

from edgemoe.kv.linear_state import LinearStates
from edgemoe.kv.shape import LinearState
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.short_convolution import ShortConvolution

pytestmark = needs_native

CHANNELS, TOKENS = 200, 30  # tasks and vectors do not divide them


def config_of(*, bias: bool) -> Any:
    sizes = {"hidden_size": CHANNELS, "conv_bias": bias, "num_hidden_layers": 1, "num_attention_heads": 4}
    return AutoConfig.for_model("lfm2_moe", layer_types=["conv"], **sizes)


def module_of(*, bias: bool) -> Any:
    """transformers' module in bf16."""
    torch.manual_seed(1)
    module = Lfm2MoeShortConv(config_of(bias=bias), 0).bfloat16().eval()
    module.conv.weight.data.mul_(4)
    return module


def native_of(module: Any) -> ShortConvolution:
    """This program's layer of a copy of a module."""
    own = deepcopy(module)
    for name in ("in_proj", "out_proj"):
        part = getattr(own, name)
        setattr(own, name, DenseLinear(part.weight.data, None, None if part.bias is None else part.bias.data))
    made = ShortConvolution.try_from(own)
    assert made is not None
    return made


def run(conv: ShortConvolution, x: torch.Tensor, ends: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Results [tokens, H] of a sequence in steps that end at `ends`, and its last inputs."""
    states, out, start = LinearStates(LinearState((0,), CHANNELS, 3, 0, 0, 0)), [], 0
    with torch.inference_mode():
        for end in ends:
            out.append(conv(x[:, start:end], states.of(0, fresh=start == 0)))
            states.commit()
            start = end
    return torch.cat(out, 1)[0], states.copies(0)[0][states.valid]


@pytest.mark.parametrize("bias", [False, True])
def test_a_short_convolution_is_transformers(bias):
    """A prompt, and new tokens after it, differ from transformers' own by the order of additions alone."""
    module = module_of(bias=bias)
    x = torch.randn(1, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(2)).bfloat16()
    own = DynamicCache(config=config_of(bias=bias))
    with torch.inference_mode():
        want = [module(x[:, :20], past_key_values=own)]
        want += [module(x[:, i : i + 1], past_key_values=own) for i in range(20, TOKENS)]
    got, _ = run(native_of(module), x, [20, *range(21, TOKENS + 1)])
    whole = torch.cat(want, 1)[0].float()
    near = 0.007 if bias else 0.004  # products are rounded before their biases are added
    assert (got.float() - whole).norm() < near * whole.norm()
    assert (got.float() - whole)[20:].norm() < near * whole[20:].norm()


def test_a_sequence_has_the_same_bits_in_parts():
    """Results and the last inputs, in one step, in several, and token by token."""
    conv = native_of(module_of(bias=True))
    x = torch.randn(1, TOKENS, CHANNELS, generator=torch.Generator().manual_seed(3)).bfloat16()
    want, inputs = run(conv, x, [TOKENS])
    for ends in ([1, 19, TOKENS], list(range(1, TOKENS + 1))):
        got, others = run(conv, x, ends)
        assert torch.equal(got, want)
        assert torch.equal(others, inputs)


def test_other_sizes_are_refused():
    """Rows and inputs that C would read beyond."""
    native = native_of(module_of(bias=False)).native
    rows, inputs = torch.zeros(3, native.reads).bfloat16(), torch.zeros(CHANNELS, 3).bfloat16()
    for wrong in (
        (rows[:, 1:].contiguous(), inputs, inputs),
        (rows, inputs[1:], inputs),
        (rows, None, inputs[:, 1:].contiguous()),
    ):
        with pytest.raises(ValueError, match=f"rows of {native.reads}"):
            native(*wrong)
