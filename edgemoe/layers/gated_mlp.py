"""Dense layers: function(gate x) * up x, gate and up in one product, or function(up x); and a product with down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from edgemoe.kernels.activation import GATED, fused_name
from edgemoe.kernels.native.functions import values_of, wide_values_of
from edgemoe.layers.dense import DenseLinear
from edgemoe.layers.gating import is_squared_relu, squared_relu

_FUNCTIONS = ("act_fn", "activation")
"""Names of a module's activation; one without it has silu in its code."""

_SEPARATE = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of the layers of gate, up and down."""

_JOINED = ("input_linear", "output_linear")
"""Names of the layers of gate and up together, and of down."""

_WITHOUT_GATE = ("up_proj", "down_proj")

_TRIED = 3
"""Rows of the trial."""


class GatedMLP(nn.Module):
    """A shared expert, or the block of a layer without experts.

    Args:
        gate_up: the layer of gate and up, one after the other.
        down: the layer of down.
        function: its activation.
        wide: whether the activation and its product with up are float32, of which the product alone is rounded.
    """

    def __init__(
        self,
        gate_up: DenseLinear,
        down: DenseLinear,
        function: Callable[[torch.Tensor], torch.Tensor],
        *,
        wide: bool = False,
    ) -> None:
        super().__init__()
        self.gate_up, self.down, self.function, self.wide = gate_up, down, function, wide

    @property
    def values(self) -> torch.Tensor:
        """The function's value for each bf16 number, [65536]: float32 where it is not rounded, else bf16."""
        return wide_values_of(self.function) if self.wide else values_of(self.function)

    @classmethod
    def try_from(cls, module: Any) -> GatedMLP | None:
        """Wraps a module in RAM that computes the formula; None for others."""
        for names in (*_SEPARATE, _JOINED):
            function = GATED.get(fused_name(_function(module)))
            if function and (found := _linears(module, names)):
                *above, down = found
                gate_up = above[0] if len(above) == 1 else DenseLinear.joined(above)
                forms = (cls(gate_up, down, function, wide=wide) for wide in (False, True))
                return next((made for made in forms if _computes(made, module)), None)
        return None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps bf16 [..., H] to bf16 [..., H]."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        inner = self.function(gate.float()) * up.float() if self.wide else self.function(gate) * up
        out: torch.Tensor = self.down(inner.to(hidden.dtype))
        return out


class PlainMLP(nn.Module):
    """A dense block without a gate: function(up x).

    Args:
        up, down: its layers.
        function: its activation.
    """

    def __init__(
        self, up: DenseLinear, down: DenseLinear, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self.up, self.down, self.function = up, down, function

    @classmethod
    def try_from(cls, module: Any) -> PlainMLP | None:
        """Wraps a module in RAM whose activation is relu squared; None for others."""
        found = _linears(module, _WITHOUT_GATE)
        if not found or not is_squared_relu(_function(module)):
            return None
        up, down = found
        made = cls(up, down, squared_relu)
        return made if _computes(made, module) else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps bf16 [..., H] to bf16 [..., H]."""
        out: torch.Tensor = self.down(self.function(self.up(hidden)))
        return out


def _function(module: Any) -> Any:
    return next((found for name in _FUNCTIONS if (found := getattr(module, name, None)) is not None), F.silu)


def _linears(module: Any, names: tuple[str, ...]) -> list[DenseLinear]:
    """The layers of a module in RAM that has no others; none: it has others."""
    parts = {name: part for name, part in module.named_children() if name not in _FUNCTIONS}
    found = [part for name in names if isinstance(part := parts.get(name), DenseLinear)]
    whole = parts.keys() == {*names} and len(found) == len(names)
    return found if whole and found[0].weight.device.type == "cpu" else []


def _computes(made: nn.Module, module: nn.Module) -> bool:
    """Whether a layer gives the bits of transformers' module, of a few rows."""
    cols = next(part.in_features for part in made.children() if isinstance(part, DenseLinear))
    x = torch.linspace(-2, 2, _TRIED * cols).bfloat16().view(_TRIED, -1)
    with torch.inference_mode():
        return torch.equal(module(x), made(x))
