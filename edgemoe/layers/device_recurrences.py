"""Short convolutions, state spaces and Kimi Delta Attention on a device: new tokens by Triton's kernels.

Prompts of short convolutions and state spaces go through transformers' module. Both leave the state in one form, so
either continues what the other one has computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgemoe.kernels.registry import triton_runs
from edgemoe.kv.linear_state import LayerState
from edgemoe.layers.row_products import RowProducts


class DeviceShortConvolution(nn.Module):
    """A gated short convolution (LFM2) on a device.

    Args:
        module: transformers' module with its weights.
        products: the product with its projection.
    """

    def __init__(self, module: Any, products: RowProducts) -> None:
        super().__init__()
        self.module, self._products = module, products
        self._conv = module.conv.weight.data[:, 0].contiguous()
        self._bias = None if module.conv.bias is None else module.conv.bias.data

    @classmethod
    def try_from(cls, module: Any) -> DeviceShortConvolution | None:
        """Wraps a module on a device where Triton's kernels run; None for others."""
        conv = getattr(module, "conv", None)
        if conv is None or not hasattr(module, "in_proj") or not triton_runs(conv.weight.device):
            return None
        if getattr(module.in_proj, "out_features", 0) != 3 * conv.out_channels:
            return None
        products = RowProducts.try_from([module.in_proj])
        return cls(module, products) if products else None

    def forward(self, hidden_states: torch.Tensor, past_key_values: LayerState) -> torch.Tensor:
        """Maps bf16 [1, R, H] to bf16 [1, R, H], and updates the state."""
        from edgemoe.kernels.triton.short_conv import launch_short_conv

        out: torch.Tensor
        if hidden_states.shape[1] != 1 or past_key_values.in_place:
            out = self.module(hidden_states=hidden_states, past_key_values=past_key_values)
            return out
        ((projected,),) = self._products(hidden_states[0])
        before, after = past_key_values.conv
        results = projected.new_empty(len(self._conv))
        earlier = None if past_key_values.fresh else before[0]
        launch_short_conv(projected, self._conv, self._bias, earlier, after[0], results)
        out = self.module.out_proj(results[None, None])
        return out


_SPACE_NEEDS = ("A_log", "D", "dt_bias", "ssm_state_size", "n_groups", "norm", "conv1d", "time_step_limit")
"""Attributes of transformers' Mamba-2 module."""


class DeviceStateSpace(nn.Module):
    """A selective state space (Mamba-2: Nemotron-H, Granite 4) on a device.

    Args:
        module: transformers' module with its weights.
        products: the product with its projection.
    """

    def __init__(self, module: Any, products: RowProducts) -> None:
        super().__init__()
        from edgemoe.kernels.triton.state_space import SpaceStep

        self.module, self._products = module, products
        conv, norm = module.conv1d, module.norm
        self._step = SpaceStep(
            *(module.n_groups, module.ssm_state_size, norm.group_size, module.time_step_limit),
            norm.variance_epsilon,
            conv.weight.data[:, 0].contiguous(),
            None if conv.bias is None else conv.bias.data,
            *(module.dt_bias.data, module.A_log.data, module.D.data, norm.weight.data),
        )

    @classmethod
    def try_from(cls, module: Any) -> DeviceStateSpace | None:
        """Wraps a module on a device where Triton's kernels run; None for others."""
        if not all(hasattr(module, name) for name in _SPACE_NEEDS) or not triton_runs(module.A_log.device):
            return None
        from edgemoe.kernels.triton.state_space import SpaceStep

        known = module.activation == "silu" and hasattr(module.norm, "group_size")
        known = known and SpaceStep.fits(module.head_dim, module.ssm_state_size)
        products = RowProducts.try_from([module.in_proj]) if known else None
        return cls(module, products) if products else None

    def forward(self, hidden_states: torch.Tensor, cache_params: LayerState) -> torch.Tensor:
        """Maps bf16 [1, R, H] to bf16 [1, R, H], and updates the state."""
        out: torch.Tensor
        if hidden_states.shape[1] != 1 or cache_params.in_place:
            out = self.module(hidden_states=hidden_states, cache_params=cache_params)
            return out
        ((projected,),) = self._products(hidden_states[0])
        results = projected.new_empty(self.module.num_heads * self.module.head_dim)
        self._step.launch(projected, cache_params.before, cache_params.after, results)
        out = self.module.out_proj(results[None, None])
        return out


class DeviceChannelDelta(nn.Module):
    """Kimi Delta Attention on a device: a delta rule with a decay for each number of a key.

    Args:
        module: transformers' module with its weights.
        first: the products with the state: queries, keys, values, rates, and the first ones of gate and decays.
        second: the products that follow the first ones of the gate and of the decays; None: none follows.
    """

    def __init__(
        self, module: Any, first: RowProducts, second: tuple[RowProducts | None, RowProducts | None]
    ) -> None:
        super().__init__()
        from edgemoe.kernels.triton.delta_net import DeltaStep

        self.module, self._first, self._second = module, first, second
        forget, norm = module.forget_gate, module.o_norm
        self._step = DeltaStep(
            *(module.num_heads, module.head_dim, module.conv1d.weight.data[:, 0].contiguous()),
            *(forget.dt_bias.data.flatten(), forget.A_log.data.flatten()),
            *(norm.weight.data, norm.variance_epsilon),
            lowest=float(forget.lower_bound) if getattr(forget, "safe_gate", False) else 0.0,
            rounded_decay=second[1] is None,
            strict=True,
        )

    @classmethod
    def try_from(cls, module: Any) -> DeviceChannelDelta | None:
        """Wraps a module on a device where Triton's kernels run; None for others."""
        needs = all(hasattr(module, name) for name in ("forget_gate", "b_proj", "o_norm"))
        if not needs or not triton_runs(module.conv1d.weight.device):
            return None
        from edgemoe.kernels.triton.delta_net import DeltaStep

        forget = module.forget_gate
        gate = [getattr(module, name, None) for name in ("g_a_proj", "g_b_proj")]
        decays = [getattr(forget, name, None) for name in ("f_a_proj", "f_b_proj")]
        gate = gate if None not in gate else [getattr(module, "g_proj", None), None]
        decays = decays if None not in decays else [getattr(forget, "f_proj", None), None]
        heads = [module.q_proj, module.k_proj, module.v_proj, module.b_proj]
        first = RowProducts.try_from([*heads, gate[0], decays[0]])
        second = [RowProducts.try_from([linear]) if linear else None for linear in (gate[1], decays[1])]
        known = module.activation == "silu" and module.o_norm.activation == "sigmoid"
        known = known and module.conv1d.bias is None and DeltaStep.fits(module.head_dim, module.head_dim)
        whole = [bool(part) for part in second] == [linear is not None for linear in (gate[1], decays[1])]
        return cls(module, first, (second[0], second[1])) if known and first and whole else None

    def forward(self, hidden_states: torch.Tensor, cache_params: LayerState) -> torch.Tensor:
        """Maps bf16 [1, R, H] to bf16 [1, R, H], and updates the state."""
        from edgemoe.kernels.triton.delta_net import DeltaInputs
        from edgemoe.kernels.triton.delta_rows import launch_rows

        rows = hidden_states[0]
        q, k, v, b, *low = self._first(rows)
        z, a = (more(part)[0] if more else part for more, part in zip(self._second, low, strict=True))
        heads = (each.unflatten(-1, (self.module.num_heads, -1)) for each in (q, k, v, z, b, a))
        results = rows.new_empty(len(rows), self.module.num_heads * self.module.head_dim)
        launch_rows(self._step, DeltaInputs(*heads), cache_params.before, cache_params.after, results)
        out: torch.Tensor = self.module.o_proj(results[None])
        return out
