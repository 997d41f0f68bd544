"""Whether kernels can compute what lies between an expert's products, by transformers' module."""

from __future__ import annotations

from typing import Any

from transformers.integrations.moe import _default_apply_gate

from edgemoe.kernels.activation import CUSTOM, fused_name


def fused_activation(module: Any) -> str:
    """The name under which kernels fuse what lies between an expert's products; CUSTOM for another than f(gate) up.

    Args:
        module: transformers' experts module.
    """
    if type(module)._apply_gate is not _default_apply_gate or not module.has_gate:
        return CUSTOM
    return fused_name(module.act_fn)
