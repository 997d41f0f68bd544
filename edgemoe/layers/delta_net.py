"""Gated delta nets (Qwen3-Next, Qwen3.5): one product for all projections, one kernel call, and the product after it.

transformers computes a single token by the recurrence, and several by products of chunks. Here all go by the
recurrence, so that rows have the same bits in a prompt, in parts of it, and as new tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.delta_net import (
    MOST_KEY_DIM,
    DeltaSizes,
    DeltaState,
    DeltaWeights,
    NativeDeltaNet,
)
from edgemoe.kernels.program import NORMED, DeltaNet, Linear, Operation
from edgemoe.kv.linear_state import LayerState
from edgemoe.layers.dense import DenseLinear

_NEEDS = ("A_log", "dt_bias", "head_v_dim", "norm", "conv1d", "out_proj")
"""Attributes of transformers' module."""

_JOINED, _SEPARATE = ("in_proj_qkvz", "in_proj_ba"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""Names of its projections: in Qwen3-Next two, by heads of keys; in Qwen3.5 four."""


class GatedDeltaNet(nn.Module):
    """A gated delta net in RAM.

    Args:
        module: transformers' module, of which nothing is kept but its weights.
        projections: DenseLinear layers, of _JOINED or _SEPARATE.
    """

    def __init__(self, module: Any, projections: list[DenseLinear]) -> None:
        super().__init__()
        self.projected, self.out = DenseLinear.joined(projections), module.out_proj
        if len(projections) == len(_JOINED):
            self.projected = self.projected.rows(_order(module, *projections))
        sizes = DeltaSizes(module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        weights = DeltaWeights(
            module.conv1d.weight.data[:, 0],
            module.dt_bias.data,
            -module.A_log.data.float().exp(),
            module.norm.weight.data,
            module.norm.variance_epsilon,
        )
        self.native = NativeDeltaNet(sizes, weights)

    @classmethod
    def try_from(cls, module: Any) -> GatedDeltaNet | None:
        """Wraps a module in RAM that the compiled kernel supports; None for others, and without the kernel."""
        if not native.available() or not all(hasattr(module, name) for name in _NEEDS):
            return None
        names = _SEPARATE if hasattr(module, _SEPARATE[0]) else _JOINED
        projections: list[Any] = [getattr(module, name, None) for name in names]
        if not _alike([*projections, module.out_proj]) or module.conv1d.bias is not None:
            return None
        known = module.activation == module.norm.activation == "silu" and module.head_k_dim <= MOST_KEY_DIM
        return cls(module, projections) if known and module.out_proj.weight.device.type == "cpu" else None

    def operations(self) -> list[Operation]:
        """From the normed state to what the last product takes."""
        projected = Linear(NORMED, "projected", self.projected.parts)
        return [projected, DeltaNet("projected", "attended", self.native)]

    def forward(self, hidden_states: torch.Tensor, cache_params: LayerState) -> torch.Tensor:
        """Maps bf16 [1, R, H] to bf16 [1, R, H], and updates the state."""
        projected = self.projected(hidden_states[0])
        state = DeltaState.of(cache_params, self.native.reads)
        out: torch.Tensor = self.out(self.native(projected, state))
        return out[None]


def _alike(linears: list[Any]) -> bool:
    """Whether layers are this program's, their weights have one type, and none has a bias."""
    if not all(type(each) is DenseLinear and each.bias is None for each in linears):
        return False
    return len({each.weight.dtype for each in linears}) == 1


def _order(module: Any, qkvz: DenseLinear, ba: DenseLinear) -> torch.Tensor:
    """Rows of both projections, one after the other, in the order of csrc/delta_net.h: each kind's rows together."""
    count = qkvz.out_features
    numbers = torch.arange(count + ba.out_features)[None, None]
    query, key, value, *others = module.fix_query_key_value_ordering(
        numbers[..., :count], numbers[..., count:]
    )
    return torch.cat([each.flatten() for each in (query, key, value, *others)])
