"""Dense gated layers, of which the first two products are one: function(gate x) * up x, and its product with down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from edgemoe.layers.dense import DenseLinear

_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}

_TRIED = 3
"""Rows of the trial."""


class GatedMLP(nn.Module):
    """A shared expert, or the block of a layer without experts.

    Args:
        module: transformers' module.
        function: its activation.
    """

    def __init__(self, module: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.gate_up, self.down = DenseLinear.joined((module.gate_proj, module.up_proj)), module.down_proj
        self.function = function

    @classmethod
    def try_from(cls, module: Any) -> GatedMLP | None:
        """Wraps a module in RAM that computes the formula; None for others."""
        if {name for name, _ in module.named_children()} != _PARTS or "silu" not in repr(
            module.act_fn
        ).lower():
            return None
        linears = module.gate_proj, module.up_proj, module.down_proj
        if not all(type(each) is DenseLinear for each in linears) or linears[0].weight.device.type != "cpu":
            return None
        made = cls(module, F.silu)
        x = torch.linspace(-2, 2, _TRIED * linears[0].in_features).bfloat16().view(_TRIED, -1)
        with torch.inference_mode():
            return made if torch.equal(module(x), made(x)) else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps bf16 [..., H] to bf16 [..., H]."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        out: torch.Tensor = self.down(self.function(gate) * up)
        return out
