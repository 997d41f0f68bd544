"""What lies between an expert's two products: the model's own function, and its name where kernels can fuse it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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

_OF_CONFIG = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


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


def fused_name(hidden_act: str | None) -> str:
    """The name under which kernels fuse a config's `hidden_act`; CUSTOM where none does.

    >>> fused_name("swish"), fused_name("relu2")
    ('silu', 'custom')
    """
    return _OF_CONFIG.get(hidden_act or "", CUSTOM)
