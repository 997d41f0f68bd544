"""Layers with a recurrent state whose rows have the same bits in a prompt, in chunks of it, and as new tokens.

transformers computes a single token by the recurrence, and several by products of chunks, whose temporary memory grows
with a chunk. Here all of them go by the recurrence, in the compiled kernel, which needs none.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.delta import MOST_KEY_DIM, DeltaRows, delta_rule
from edgemoe.kv.linear_state import LayerState
from edgemoe.layers.rows_alike import RowsAlike


class Recurrence(nn.Module):
    """A layer of a kind that the compiled kernel supports.

    Args:
        module: transformers' module, in RAM.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    """Attributes that a module of the kind has."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    @staticmethod
    def of(module: Any) -> Recurrence | None:
        """Wraps a module of a kind that the compiled kernel supports; None for others, and without the kernel."""
        kinds = (ChannelDelta, StateSpace)
        kind = next((kind for kind in kinds if all(hasattr(module, name) for name in kind.needs)), None)
        if kind is None or not native.available() or module.conv1d.weight.device.type != "cpu":
            return None
        made = kind(module)
        return made if module.activation == "silu" and made.key_dim <= MOST_KEY_DIM else None

    @property
    @abstractmethod
    def key_dim(self) -> int:
        """Size of a key."""

    @abstractmethod
    def forward(self, hidden_states: torch.Tensor, cache_params: LayerState) -> torch.Tensor:
        """Maps bf16 [1, R, H] to bf16 [1, R, H], and updates the state."""

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


class ChannelDelta(Recurrence):
    """A delta rule with a decay for each number of a key (Kimi Delta Attention)."""

    needs = ("forget_gate", "b_proj", "o_norm")

    @property
    def key_dim(self) -> int:
        """Size of a key."""
        return int(self.module.head_dim)

    def forward(self, hidden_states: torch.Tensor, cache_params: LayerState) -> torch.Tensor:
        """See Recurrence."""
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


class StateSpace(Recurrence):
    """A selective state space (Mamba-2): its module's C, B and x are queries, keys and values here."""

    needs = ("A_log", "D", "dt_bias", "ssm_state_size", "n_groups")

    @property
    def key_dim(self) -> int:
        """Size of a key."""
        return int(self.module.ssm_state_size)

    def forward(self, hidden_states: torch.Tensor, cache_params: LayerState) -> torch.Tensor:
        """See Recurrence."""
        net, rows = self.module, hidden_states.shape[1]
        keys = net.n_groups * net.ssm_state_size
        with RowsAlike():
            projected = net.in_proj(hidden_states)
            gate, joined, step = projected.split((net.intermediate_size, net.conv_dim, net.num_heads), dim=-1)
            convolved = self._convolved(joined, cache_params)
            value, key, query = convolved.split((net.intermediate_size, keys, keys), dim=-1)
            step = F.softplus(step + net.dt_bias.to(step.dtype)).clamp(*net.time_step_limit)[0].float()
            parts = DeltaRows(
                query.reshape(rows, net.n_groups, -1).contiguous(),
                key.reshape(rows, net.n_groups, -1).contiguous(),
                value.reshape(rows, net.num_heads, -1).contiguous(),
                (-net.A_log.float().exp() * step)[:, :, None].contiguous(),
                step.contiguous(),
            )
            # The module's own state is [heads, head_dim, ssm_state_size]; only this class reads what it writes.
            state = cache_params.recurrent_after()[0].view(net.num_heads, net.ssm_state_size, net.head_dim)
            core = delta_rule(parts, state, net.D.float())
            out: torch.Tensor = net.out_proj(net.norm(core.view(1, rows, -1), gate))
        return out
