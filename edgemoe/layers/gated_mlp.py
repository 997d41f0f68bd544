"""Dense gated layers, of which the first two products are one: function(gate x) * up x, and its product with down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from edgemoe.layers.dense import DenseLinear

_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of the layers of gate, up and down."""

_TRIED = 3
"""Rows of the trial."""


class GatedMLP(nn.Module):
    """A shared expert, or the block of a layer without experts.

    Args:
        linears: the layers of gate, up and down.
        function: its activation.
    """

    def __init__(
        self, linears: Sequence[DenseLinear], function: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        gate, up, self.down = linears
        self.gate_up, self.function = DenseLinear.joined((gate, up)), function

    @classmethod
    def try_from(cls, module: Any) -> GatedMLP | None:
        """Wraps a module in RAM that computes the formula; None for others."""
        parts = dict(module.named_children())
        function = parts.pop("act_fn", F.silu)
        names = next((names for names in _NAMES if parts.keys() == {*names}), ())
        linears = [parts[name] for name in names]
        if not linears or "silu" not in repr(function).lower():
            return None
        if not all(type(each) is DenseLinear for each in linears) or linears[0].weight.device.type != "cpu":
            return None
        made = cls(linears, F.silu)
        x = torch.linspace(-2, 2, _TRIED * linears[0].in_features).bfloat16().view(_TRIED, -1)
        with torch.inference_mode():
            return made if torch.equal(module(x), made(x)) else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps bf16 [..., H] to bf16 [..., H]."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        out: torch.Tensor = self.down(self.function(gate) * up)
        return out
