"""Selective state spaces (Mamba-2: Nemotron-H, Granite 4): a product, one kernel call, and the product after it.

transformers computes a single token by the recurrence, and several by products of chunks, whose temporary memory grows
with a chunk. Here all go by the recurrence, so that rows have the same bits in a prompt, in parts of it, and as new
tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.delta_net import DeltaState
from edgemoe.kernels.native.state_space import NativeStateSpace, SpaceSizes, SpaceWeights
from edgemoe.kernels.program import NORMED, Linear, Operation, StateSpace
from edgemoe.kv.linear_state import LayerState
from edgemoe.layers.dense import DenseLinear

_NEEDS = ("A_log", "D", "dt_bias", "ssm_state_size", "n_groups", "norm", "conv1d", "time_step_limit")
"""Attributes of transformers' module."""


class SelectiveStateSpace(nn.Module):
    """A selective state space in RAM.

    Args:
        module: transformers' module, of which nothing is kept but its weights.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.projected, self.out = module.in_proj, module.out_proj
        sizes = SpaceSizes(module.n_groups, module.num_heads, module.ssm_state_size, module.head_dim)
        conv, norm = module.conv1d, module.norm
        weights = SpaceWeights(
            conv.weight.data[:, 0],
            None if conv.bias is None else conv.bias.data,
            module.dt_bias.data,
            module.time_step_limit,
            -module.A_log.data.float().exp(),
            module.D.data,
            norm.weight.data,
            norm.group_size,
            norm.variance_epsilon,
        )
        self.native = NativeStateSpace(sizes, weights)

    @classmethod
    def try_from(cls, module: Any) -> SelectiveStateSpace | None:
        """Wraps a module in RAM that the compiled kernel supports; None for others, and without the kernel."""
        if not native.available() or not all(hasattr(module, name) for name in _NEEDS):
            return None
        linears = module.in_proj, module.out_proj
        if not all(type(each) is DenseLinear for each in linears) or not hasattr(module.norm, "group_size"):
            return None
        known = module.activation == "silu" and linears[0].weight.device.type == "cpu"
        return cls(module) if known else None

    def operations(self) -> list[Operation]:
        """From the normed state to what the last product takes."""
        projected = Linear(NORMED, "projected", self.projected.parts)
        return [projected, StateSpace("projected", "attended", self.native)]

    def forward(self, hidden_states: torch.Tensor, cache_params: LayerState) -> torch.Tensor:
        """Maps bf16 [1, R, H] to bf16 [1, R, H], and updates the state.

        The module's own state is [heads, head_dim, ssm_state_size]; only the kernel reads what it writes.
        """
        heads, key_dim, value_dim = (
            getattr(self.native.sizes, name) for name in ("heads", "key_dim", "value_dim")
        )
        state = DeltaState.of(cache_params, self.native.reads)
        before, after = (
            pair and (pair[0], pair[1].view(heads, key_dim, value_dim))
            for pair in (state.before, state.after)
        )
        assert after
        state = DeltaState(before, after, state.earlier)
        out: torch.Tensor = self.out(self.native(self.projected(hidden_states[0]), state))
        return out[None]
