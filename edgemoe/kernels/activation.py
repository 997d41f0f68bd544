"""Which gatings a kernel can compute by itself, between an expert's two products, and which one a model's is.

A model's gating is recognised by what it does with a few numbers, not by what it is called: families name and place
it differently. One that is not recognised is called, as the model has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from edgemoe.kernels.base import Activation

NONE = "none"

GATINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
"""Name -> f: a gating of halves h and u to f(h) u."""

_known: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()


def gating_of(gate: Activation) -> str:
    """The name of a model's gating among GATINGS, or NONE. Asks the model once, on the CPU.

    Only a method of a module is recognised: what else is called may have rows of its own to add, such as biases.
    """
    module = getattr(gate, "__self__", None)
    if not isinstance(module, torch.nn.Module):
        return NONE
    if module not in _known:
        _known[module] = _recognised(gate)
    return _known[module]


def _recognised(gate: Activation) -> str:
    both = 5 * torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    half, up = both.chunk(2, dim=1)
    try:
        found = gate(both)
    except RuntimeError:
        return NONE  # It has weights, and they are elsewhere.
    for name, function in GATINGS.items():
        want = function(half) * up
        if found.shape == want.shape and torch.allclose(found, want, rtol=1e-5, atol=1e-6):
            return name
    return NONE
