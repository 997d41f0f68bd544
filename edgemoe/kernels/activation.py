"""The function between an expert's two products: the model's own, and its name where kernels can fuse it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F

CUSTOM = "custom"
"""The name of an activation that no kernel fuses."""

GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""Name -> f: the activation of halves h and u is f(h) u."""

_OF_CLASS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUActivation": "gelu", "GELUTanh": "gelu_tanh"}
"""Class of an activation in transformers, or in torch -> its name in GATED."""


@dataclass(frozen=True)
class Activation:
    """An activation by function and name.

    >>> both = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    >>> Activation.gated("silu").apply(both)
    tensor([[0.0000, 2.1932]])

    Args:
        name: a key of GATED, or CUSTOM.
        apply: [R, 2 I], gate and up -> [R, I], of all rows of a call at once.
    """

    name: str
    apply: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def gated(cls, name: str) -> Activation:
        """The activation of a key of GATED, by torch's operators."""
        function = GATED[name]

        def apply(both: torch.Tensor) -> torch.Tensor:
            half, up = both.chunk(2, dim=-1)
            return function(half) * up

        return cls(name, apply)


def between(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function between an experts module's products: [R, 2 I] -> [R, I], or without a gate [R, I] -> [R, I]."""
    function: Callable[[torch.Tensor], torch.Tensor] = (
        module._apply_gate if module.has_gate else module.act_fn
    )
    return function


def fused_name(function: object) -> str:
    """The name under which kernels fuse the activation of an experts module; CUSTOM where none does.

    >>> fused_name(torch.nn.SiLU()), fused_name(torch.nn.ReLU())
    ('silu', 'custom')
    """
    if function is F.silu:
        return "silu"
    # transformers' classes of gelu have torch's function in `act`, or a method with a formula of their own.
    if isinstance(getattr(function, "act", None), MethodType):
        return CUSTOM
    return _OF_CLASS.get(type(function).__name__, CUSTOM)
