"""Gated delta nets on a device: Triton's kernels between the projections and the output's product.

A new token takes one launch. Prompts go by the recurrence too, in five launches for any number of tokens; transformers
computes them by products of chunks, in some 150 operators for 512 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgemoe.kernels.registry import triton_runs
from edgemoe.kv.linear_state import LayerState
from edgemoe.layers.row_products import RowProducts

_NEEDS = ("A_log", "dt_bias", "head_v_dim", "norm", "conv1d", "out_proj")
"""Attributes of transformers' module."""

_JOINED, _SEPARATE = ("in_proj_qkvz", "in_proj_ba"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""Names of its projections: in Qwen3-Next two, by heads of keys; in Qwen3.5 four."""


class DeviceDeltaNet(nn.Module):
    """A gated delta net on a device.

    Args:
        module: transformers' module with its weights.
        products: the products with its projections, of _JOINED or of _SEPARATE.
    """

    def __init__(self, module: Any, products: RowProducts) -> None:
        super().__init__()
        from edgemoe.kernels.triton.delta_net import DeltaStep

        self.module, self._products = module, products
        self._joined = not hasattr(module, _SEPARATE[0])
        conv = module.conv1d.weight.data[:, 0].contiguous()
        parts = conv, module.dt_bias.data, module.A_log.data, module.norm.weight.data
        self._step = DeltaStep(module.num_v_heads, module.head_v_dim, *parts, module.norm.variance_epsilon)

    @classmethod
    def try_from(cls, module: Any) -> DeviceDeltaNet | None:
        """Wraps a module on a device where Triton's kernels run; None for others."""
        if not all(hasattr(module, name) for name in _NEEDS) or not triton_runs(module.A_log.device):
            return None
        from edgemoe.kernels.triton.delta_net import DeltaStep

        names = _SEPARATE if hasattr(module, _SEPARATE[0]) else _JOINED
        known = module.conv1d.bias is None and module.activation == module.norm.activation == "silu"
        known = known and DeltaStep.fits(module.head_k_dim, module.head_v_dim)
        products = RowProducts.try_from([getattr(module, name, None) for name in names]) if known else None
        return cls(module, products) if products else None

    def forward(self, hidden_states: torch.Tensor, cache_params: LayerState) -> torch.Tensor:
        """Maps bf16 [1, R, H] to bf16 [1, R, H], and updates the state."""
        from edgemoe.kernels.triton.delta_rows import launch_rows

        rows = hidden_states[0]
        results = rows.new_empty(len(rows), self.module.num_v_heads * self.module.head_v_dim)
        inputs = self._inputs(self._products(rows))
        launch_rows(self._step, inputs, cache_params.before, cache_params.after, results)
        out: torch.Tensor = self.module.out_proj(results[None])
        return out

    def _inputs(self, projected: list[torch.Tensor]) -> Any:
        """The kernels' arguments: views of projections [R, N] by heads of keys."""
        from edgemoe.kernels.triton.delta_net import DeltaInputs

        module = self.module
        heads, dim = module.num_k_heads, module.head_k_dim
        sharing = module.num_v_heads // heads
        values = sharing * module.head_v_dim
        if self._joined:
            qkvz, ba = (each.unflatten(-1, (heads, -1)) for each in projected)
            return DeltaInputs(*qkvz.split([dim, dim, values, values], -1), *ba.split(sharing, -1))
        qkv, z, b, a = projected
        q, k, v = qkv.split([heads * dim, heads * dim, heads * values], -1)
        return DeltaInputs(*(each.unflatten(-1, (heads, -1)) for each in (q, k, v, z, b, a)))
