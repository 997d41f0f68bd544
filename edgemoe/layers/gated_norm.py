"""Norms whose result is multiplied by a gate of low rank that is made of it (A.X-K2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from edgemoe.kernels.native.functions import values_of, wide_values_of
from edgemoe.kernels.program import Apply, Linear, Norm, Operation, Scale
from edgemoe.layers.dense import DenseLinear, DenseNorm

_LAYERS = ("fc1", "fc2")
"""Names of the layers of the gate."""


class GatedNorm(nn.Module):
    """y sigmoid(second silu(first y)) for the result y of a norm; sigmoid and the product with it are float32.

    Args:
        norm: the norm.
        first, second: the layers of the gate, [R, H] and [H, R].
    """

    def __init__(self, norm: DenseNorm, first: DenseLinear, second: DenseLinear) -> None:
        super().__init__()
        self.norm, self.first, self.second = norm, first, second

    @property
    def weight(self) -> torch.Tensor:
        """The weight of the norm, whose last dimension is H."""
        return self.norm.weight

    @classmethod
    def try_from(cls, module: Any) -> GatedNorm | None:
        """Wraps a module in RAM that computes the formula; None for others."""
        norm, gate = getattr(module, "norm", None), getattr(module, "mlp", None)
        first, second = (getattr(gate, name, None) for name in _LAYERS)
        if not isinstance(norm, DenseNorm) or not isinstance(first, DenseLinear):
            return None
        if not isinstance(second, DenseLinear):
            return None
        made = cls(norm, first, second)
        x = torch.linspace(-2, 2, 3 * norm.weight.shape[-1]).bfloat16().view(3, -1)
        with torch.inference_mode():
            return made if torch.equal(module(x), made(x)) else None

    def operations(self, source: str, target: str) -> list[Operation]:
        """From the buffer `source` to the buffer `target`."""
        return [
            Norm(source, target, self.norm.weight.data, self.norm.variance_epsilon),
            Linear(target, "low_rank", self.first.parts),
            Apply("low_rank", "low_rank", values_of(F.silu)),
            Linear("low_rank", "norm_gate", self.second.parts),
            Scale("norm_gate", target, wide_values_of(torch.sigmoid)),
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps bf16 [..., H] to bf16 [..., H]."""
        y: torch.Tensor = self.norm(x)
        gate: torch.Tensor = self.second(F.silu(self.first(y)))
        return (y * torch.sigmoid(gate.float())).to(y.dtype)
