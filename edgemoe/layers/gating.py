"""Whether kernels can compute what lies between an expert's products, by transformers' module."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import _default_apply_gate

from edgemoe.kernels.activation import CUSTOM, GATED, fused_name
from edgemoe.kernels.native.expert_activation import GateTables
from edgemoe.kernels.native.functions import values_of, wide_values_of


def fused_activation(module: Any) -> str:
    """The name under which kernels fuse what lies between an expert's products; CUSTOM for another than f(gate) up.

    Args:
        module: transformers' experts module.
    """
    if type(module)._apply_gate is not _default_apply_gate or not module.has_gate:
        return CUSTOM
    return fused_name(module.act_fn)


_TRIED = 4096
"""Pairs of numbers of a trial."""


def gate_tables(module: Any) -> GateTables | None:
    """The tables of an experts module whose activation is known; None for others.

    Known are gelu(gate) up, a clamped gate (gpt-oss), and relu squared without a gate. A clamped gate with an up of 0
    has the function of the gate alone. The whole is compared with the module on noise.

    Args:
        module: transformers' experts module.
    """
    limit = getattr(module, "limit", None)
    if not module.has_gate:
        return GateTables(values_of(squared_relu), None, False) if is_squared_relu(module.act_fn) else None
    numbers = values_of(torch.clone)
    if limit is None:
        return _plain_tables(module)
    for interleaved in (True, False):
        dim = -1 if interleaved else 0
        both = torch.stack((numbers, torch.zeros_like(numbers)), dim).reshape(1, -1)
        with torch.inference_mode():
            gate = module._apply_gate(both)[0].contiguous()
            up = numbers.clamp(-limit, limit) + 1
            if _are_its(module, gate, up, interleaved=interleaved):
                return GateTables(gate, up, interleaved)
    return None


def _plain_tables(module: Any) -> GateTables | None:
    """The tables of f(gate) up; None: it is something else. f may be left in float32 for the product with up."""
    function, numbers = GATED.get(fused_name(module.act_fn)), values_of(torch.clone)
    forms = [values_of(function), wide_values_of(function)] if function else []
    own = (form for form in forms if _are_its(module, form, numbers, interleaved=False))
    return next((GateTables(form, numbers, False) for form in own), None)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """The square of what is above 0."""
    return F.relu(x).square()


def is_squared_relu(function: Any) -> bool:
    """Whether a function computes `squared_relu`."""
    numbers = values_of(torch.clone)
    with torch.inference_mode():
        return torch.equal(function(numbers).nan_to_num(), squared_relu(numbers).nan_to_num())


def _are_its(module: Any, gate_values: torch.Tensor, up_values: torch.Tensor, *, interleaved: bool) -> bool:
    """Whether tables give what an experts module gives, of noise."""
    noise = torch.randn(2, _TRIED, generator=torch.Generator().manual_seed(0)).mul(4).bfloat16()
    gate, up = (each.view(torch.int16).long() & 0xFFFF for each in noise)
    both = torch.stack(tuple(noise), -1 if interleaved else 0).reshape(1, -1)
    with torch.inference_mode():
        found: torch.Tensor = module._apply_gate(both)[0]
    return torch.equal(found, (gate_values[gate] * up_values[up]).to(found.dtype))
