"""Selective state spaces: transformers' own results, and the same bits however a sequence is cut."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from availability import needs_native
from family_models import small_config
from torch import nn
from transformers import DynamicCache
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from edgemoe.kernels.native.delta_net import DeltaState
from edgemoe.kv.linear_state import LinearStates
from edgemoe.kv.shape import LinearState
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.state_space import SelectiveStateSpace

pytestmark = needs_native

CLASSES = {"nemotron_h": NemotronHMamba2Mixer, "granitemoehybrid": GraniteMoeHybridMambaLayer}
TOKENS = 40


@cache
def module_of(model_type: str) -> Any:
    """transformers' module with weights whose states decay and grow, all bf16."""
    config = small_config(model_type)
    if model_type == "granitemoehybrid":
        config.time_step_limit = (0.1, 0.9)
    module = CLASSES[model_type](config, 0).bfloat16().eval()
    generator = torch.Generator().manual_seed(1)
    for name, weight in module.named_parameters():
        spread = 0.1 if weight.dim() == 2 else 0.4
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * spread)
        if name in ("D", "norm.weight"):
            weight.data.add_(1)
    return module


def native_of(module: Any) -> SelectiveStateSpace:
    """This program's layer of a copy of a module."""
    own = deepcopy(module)
    for name, part in list(own.named_children()):
        if isinstance(part, nn.Linear):
            setattr(own, name, DenseLinear(part.weight.data, None, None))
    made = SelectiveStateSpace.try_from(own)
    assert made is not None
    return made


def states_of(space: SelectiveStateSpace) -> LinearStates:
    """The empty states of a sequence, in the order of transformers' module."""
    _, heads, key_dim, value_dim = space.native.sizes
    return LinearStates(LinearState((0,), space.native.sizes.channels, 4, heads, value_dim, key_dim))


def run(space: SelectiveStateSpace, x: torch.Tensor, ends: list[int]) -> tuple[torch.Tensor, LinearStates]:
    """Results [tokens, H] of a sequence in steps that end at `ends`, and its states."""
    states, out, start = states_of(space), [], 0
    with torch.inference_mode():
        for end in ends:
            out.append(space(x[:, start:end], states.of(0, fresh=start == 0)))
            states.commit()
            start = end
    return torch.cat(out, 1)[0], states


def noise(seed: int) -> torch.Tensor:
    return torch.randn(1, TOKENS, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("model_type", CLASSES)
def test_a_state_space_is_transformers(model_type):
    """A prompt by chunks, and tokens after it, differ from transformers' own as bf16 rounds.

    transformers rounds the state to bf16 for a single token's result; and leaves out the limits of its step.
    """
    module, x = module_of(model_type), noise(2)
    own = DynamicCache(config=small_config(model_type))
    limits = module.time_step_limit
    with torch.inference_mode():
        want = [module(x[:, :30], cache_params=own)]
        if limits == (0.0, float("inf")) or model_type == "nemotron_h":
            want += [module(x[:, i : i + 1], cache_params=own) for i in range(30, TOKENS)]
    whole = torch.cat(want, 1)[0].float()
    got, _ = run(native_of(module), x, [30, *range(31, TOKENS + 1)])
    got = got[: len(whole)].float()
    assert (got - whole)[:30].norm() < 0.006 * whole[:30].norm()
    assert (got - whole).norm() < 0.01 * whole.norm()


@pytest.mark.parametrize("model_type", CLASSES)
def test_a_sequence_has_the_same_bits_in_parts(model_type):
    """Results and both parts of the state, in one step, in several, and token by token."""
    space, x = native_of(module_of(model_type)), noise(3)
    want, states = run(space, x, [TOKENS])
    for ends in ([2, 19, TOKENS], list(range(1, TOKENS + 1))):
        got, others = run(space, x, ends)
        assert torch.equal(got, want)
        for mine, theirs in zip(others.copies(0), states.copies(0), strict=True):
            assert torch.equal(mine[others.valid], theirs[states.valid])


def test_blocks_of_a_step_have_the_bits_of_the_whole():
    """A later block of a step's rows reads the states where it writes them."""
    space, x = native_of(module_of("nemotron_h")), noise(4)
    want, wanted = run(space, x, [TOKENS])
    states = states_of(space)
    with torch.inference_mode():
        found = [space(x[:, :17], states.of(0, fresh=True))]
        found.append(space(x[:, 17:], states.of(0, fresh=False, continued=True)))
    states.commit()
    assert torch.equal(torch.cat(found, 1)[0], want)
    for mine, theirs in zip(states.copies(0), wanted.copies(0), strict=True):
        assert torch.equal(mine[states.valid], theirs[wanted.valid])


def test_other_sizes_are_refused():
    """Rows and states that C would read beyond."""
    native = native_of(module_of("nemotron_h")).native
    _, heads, key_dim, value_dim = native.sizes
    conv, recurrent = torch.zeros(native.sizes.channels, 4).bfloat16(), torch.zeros(heads, key_dim, value_dim)
    rows = torch.zeros(3, native.reads).bfloat16()
    for wrong in (
        (rows[:, 1:].contiguous(), DeltaState((conv, recurrent), (conv, recurrent))),
        (rows, DeltaState(None, (conv[1:], recurrent))),
        (rows, DeltaState((conv, recurrent[1:]), (conv, recurrent))),
    ):
        with pytest.raises(ValueError, match=f"rows of {native.reads}"):
            native(*wrong)
