"""Gated short convolutions (LFM2): a product, one kernel call, and the product after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.short_conv import MOST_TAPS, NativeShortConv
from edgemoe.kernels.program import NORMED, Linear, Operation, ShortConv
from edgemoe.kv.linear_state import LayerState
from edgemoe.layers.dense import DenseLinear


class ShortConvolution(nn.Module):
    """A gated short convolution in RAM.

    Args:
        module: transformers' module: in_proj, conv and out_proj, of which nothing is kept but its weights.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.projected, self.out = module.in_proj, module.out_proj
        bias = None if module.conv.bias is None else module.conv.bias.data
        self.native = NativeShortConv(module.conv.weight.data[:, 0], bias)

    @classmethod
    def try_from(cls, module: Any) -> ShortConvolution | None:
        """Wraps a module in RAM that the compiled kernel supports; None for others, and without the kernel."""
        conv = getattr(module, "conv", None)
        linears: list[Any] = [getattr(module, f"{name}_proj", None) for name in ("in", "out")]
        if not native.available() or conv is None or not all(type(each) is DenseLinear for each in linears):
            return None
        fits = linears[0].out_features == 3 * conv.out_channels and conv.kernel_size[0] <= MOST_TAPS
        return cls(module) if fits and conv.weight.device.type == "cpu" else None

    def operations(self) -> list[Operation]:
        """From the normed state to what the last product takes."""
        projected = Linear(NORMED, "projected", self.projected.parts)
        return [projected, ShortConv("projected", "attended", self.native)]

    def forward(self, hidden_states: torch.Tensor, past_key_values: LayerState) -> torch.Tensor:
        """Maps bf16 [1, R, H] to bf16 [1, R, H], and updates the state."""
        before, after = past_key_values.conv
        inputs = None if past_key_values.fresh else before[0]
        earlier = past_key_values.earlier(self.native.reads)
        out: torch.Tensor = self.out(self.native(self.projected(hidden_states[0]), inputs, after[0], earlier))
        return out[None]
