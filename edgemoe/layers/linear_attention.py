"""Linear attention and other layers with a state of fixed size, over the sequences of a step: each has its own."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from edgemoe.kernels import threads
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.delta import MOST_KEY_DIM, DeltaRows, delta_rule
from edgemoe.kv.linear_state import LayerState
from edgemoe.kv.step import StepKV
from edgemoe.layers.rows_alike import RowsAlike


def stateful_modules(model: nn.Module) -> dict[str, Any]:
    """The modules of decoder layers that keep a state of fixed size, by name: those with a convolution over tokens."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "layer_idx") and any(isinstance(part, nn.Conv1d) for part in module.children())
    }


class PerSequence(nn.Module):
    """Runs a module that keeps a state of fixed size for each sequence of a step.

    Args:
        module: transformers' module, or a DeltaNet.
        layer: its number.
    """

    def __init__(self, module: nn.Module, layer: int) -> None:
        super().__init__()
        self.module, self.layer = module, layer

    def forward(
        self,
        hidden_states: torch.Tensor,
        cache_params: StepKV | None = None,
        past_key_values: StepKV | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Maps bf16 [1, rows, H] of all sequences to bf16 [1, rows, H], and updates each sequence's state.

        The step's state has one of two names, by family.
        """
        name, kv = "past_key_values", past_key_values
        if kv is None:
            name, kv = "cache_params", cache_params
        assert kv is not None
        if kv.signal:
            _warn_of_load()
        kv.ranks = None
        out = []
        for (sequence, row, rows), place in zip(kv.spans, kv.places, strict=True):
            assert sequence.states is not None
            continued = place.part.start > 0
            state = sequence.states.of(self.layer, fresh=sequence.length == 0, continued=continued)
            with threads.for_product(64 * rows * hidden_states.shape[2]):
                own = hidden_states[:, row : row + rows]
                out.append(self.module(hidden_states=own, **{name: state}))
        return torch.cat(out, dim=1)


class DeltaNet(nn.Module):
    """A gated delta net whose rows have the same bits in a prompt, in chunks of it, and as new tokens.

    transformers computes a single token by the recurrence, and several by products of chunks. Here all of them go by
    the recurrence, in the compiled kernel.

    Args:
        module: transformers' module, in RAM.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    @classmethod
    def try_from(cls, module: Any) -> DeltaNet | None:
        """Wraps a module of a kind that the compiled kernel supports; None for others, and without the kernel."""
        delta = hasattr(module, "in_proj_qkvz") or hasattr(module, "in_proj_qkv")
        if not delta or not native.available() or module.conv1d.weight.device.type != "cpu":
            return None
        return cls(module) if module.activation == "silu" and module.head_k_dim <= MOST_KEY_DIM else None

    def forward(self, hidden_states: torch.Tensor, cache_params: LayerState) -> torch.Tensor:
        """Maps bf16 [1, R, H] to bf16 [1, R, H], and updates the state."""
        net, state = self.module, cache_params
        rows, layer = hidden_states.shape[1], net.layer_idx
        with RowsAlike():
            joined, z, b, a = self._projected(hidden_states)
            convolved = self._convolved(state.update_conv_state(joined.transpose(1, 2), layer), rows)
            decay = -net.A_log.float().exp() * F.softplus(a.float() + net.dt_bias)
            query, key, value = convolved.split((net.key_dim, net.key_dim, net.value_dim), dim=-1)
            parts = DeltaRows(
                query.reshape(rows, -1, net.head_k_dim).contiguous(),
                key.reshape(rows, -1, net.head_k_dim).contiguous(),
                value.reshape(rows, -1, net.head_v_dim).contiguous(),
                decay[0].contiguous(),
                b.sigmoid().float()[0].contiguous(),
            )
            after = state.recurrent_after()
            core = delta_rule(parts, after[0])
            normed = net.norm(core.view(-1, net.head_v_dim), z.reshape(-1, net.head_v_dim))
            out: torch.Tensor = net.out_proj(normed.view(1, rows, -1))
        return out

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Maps bf16 [1, R, H] to queries, keys and values [1, R, channels], the output's gate, and b and a of decay."""
        net = self.module
        if hasattr(net, "in_proj_qkv"):
            return (
                net.in_proj_qkv(hidden),
                net.in_proj_z(hidden),
                net.in_proj_b(hidden),
                net.in_proj_a(hidden),
            )
        mixed = net.in_proj_qkvz(hidden), net.in_proj_ba(hidden)
        query, key, value, z, b, a = net.fix_query_key_value_ordering(*mixed)
        parts = [each.reshape(1, hidden.shape[1], -1) for each in (query, key, value)]
        return torch.cat(parts, dim=-1), z, b, a

    def _convolved(self, inputs: torch.Tensor, rows: int) -> torch.Tensor:
        """Convolves bf16 [1, channels, kernel + R], the earlier inputs first, to bf16 [R, channels]."""
        conv, wide = self.module.conv1d, inputs[0].float()
        weight = conv.weight[:, 0].float()
        summed = wide[:, 1 : 1 + rows] * weight[:, :1]
        for tap in range(1, weight.shape[1]):
            summed += wide[:, 1 + tap : 1 + tap + rows] * weight[:, tap : tap + 1]
        if conv.bias is not None:
            summed += conv.bias.float()[:, None]
        return F.silu(summed.t().to(torch.bfloat16))


@cache
def _warn_of_load() -> None:
    """Warns once per process that load ranks the experts."""
    logging.getLogger("edgemoe").warning(
        "linear-attention layers have no attention scores: there the experts of a prompt are ranked by load"
    )
