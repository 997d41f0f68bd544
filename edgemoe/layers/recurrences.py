"""Kimi Delta Attention, whose rows have the same bits in a prompt, in chunks of it, and as new tokens.

transformers computes a single token by the recurrence, and several by products of chunks, whose temporary memory grows
with a chunk. Here all of them go by the recurrence, in the compiled kernel, which needs none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.delta import MOST_KEY_DIM, DeltaRows, delta_rule
from edgemoe.kv.linear_state import LayerState
from edgemoe.layers.rows_alike import RowsAlike

_NEEDS = ("forget_gate", "b_proj", "o_norm")
"""Attributes of transformers' module."""


class ChannelDelta(nn.Module):
    """A delta rule with a decay for each number of a key.

    Args:
        module: transformers' module, in RAM.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    @classmethod
    def try_from(cls, module: Any) -> ChannelDelta | None:
        """Wraps a module in RAM that the compiled kernel supports; None for others, and without the kernel."""
        if not native.available() or not all(hasattr(module, name) for name in _NEEDS):
            return None
        known = module.activation == "silu" and module.head_dim <= MOST_KEY_DIM
        return cls(module) if known and module.conv1d.weight.device.type == "cpu" else None

    def forward(self, hidden_states: torch.Tensor, cache_params: LayerState) -> torch.Tensor:
        """Maps bf16 [1, R, H] to bf16 [1, R, H], and updates the state."""
        net, shape = self.module, (hidden_states.shape[1], -1, self.module.head_dim)
        with RowsAlike():
            projected = [linear(hidden_states) for linear in (net.q_proj, net.k_proj, net.v_proj)]
            convolved = self._convolved(torch.cat(projected, dim=-1), cache_params)
            query, key, value = (part.reshape(shape).contiguous() for part in convolved.chunk(3, dim=-1))
            decay = net.forget_gate(hidden_states)[0].float().contiguous()
            rate = net.b_proj(hidden_states).sigmoid()[0].float().contiguous()
            core = delta_rule(DeltaRows(query, key, value, decay, rate), cache_params.recurrent_after()[0])
            narrow = hasattr(net, "g_a_proj")
            gate = net.g_b_proj(net.g_a_proj(hidden_states)) if narrow else net.g_proj(hidden_states)
            normed = net.o_norm(core[None], gate.view(1, *shape))
            out: torch.Tensor = net.o_proj(normed.reshape(1, shape[0], -1))
        return out

    def _convolved(self, projected: torch.Tensor, state: LayerState) -> torch.Tensor:
        """Convolves bf16 [1, R, channels] with the inputs before them to bf16 [R, channels], after silu."""
        conv, rows = self.module.conv1d, projected.shape[1]
        wide = state.update_conv_state(projected.transpose(1, 2), self.module.layer_idx)[0].float()
        weight = conv.weight[:, 0].float()
        summed = wide[:, 1 : 1 + rows] * weight[:, :1]
        for tap in range(1, weight.shape[1]):
            summed += wide[:, 1 + tap : 1 + tap + rows] * weight[:, tap : tap + 1]
        if conv.bias is not None:
            summed += conv.bias.float()[:, None]
        return F.silu(summed.t().to(torch.bfloat16))
