"""Quantizers of the paper on low-rank compensation, whose codes edgemoe's stores do not have.

HQQ is written from its published update; tests compare it with values that the hqq package gave.
"""

from __future__ import annotations

import torch

GROUP = 64
"""Columns that share a scale and a zero, as in edgemoe's records."""

SCALES = 2 * 16 / GROUP
"""Bits per weight of a group's scale and zero, 16 bits each."""

_POWER, _BETA, _ITERATIONS = 0.7, 10.0, 20
"""Defaults of hqq 0.2.8, whose solver keeps the penalty constant: the power of the norm, the penalty, iterations."""


def round_to_nearest(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounds a matrix to codes between each group's least and largest weight, and back.

    Args:
        weight: float32 [N, K], K a multiple of GROUP.
        bits: bits of a code.

    Returns:
        float32 [N, K].
    """
    grouped = weight.reshape(-1, GROUP)
    scale, zero = _from_range(grouped, bits)
    return ((_codes(grouped, scale, zero, bits) - zero) / scale).view_as(weight)


def half_quadratic(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantizes a matrix as HQQ does, and decodes it: zeros are moved so that few large errors are left.

    Each iteration takes what exceeds a shrinkage of the errors out of the weights, and fits the zeros to the rest. It
    ends when the mean absolute error of the whole matrix grows.

    Args:
        weight: float32 [N, K], K a multiple of GROUP.
        bits: bits of a code.

    Returns:
        float32 [N, K].
    """
    grouped = weight.reshape(-1, GROUP)
    scale, zero = _from_range(grouped, bits)
    if bits == 4:
        zero = zero.round()
    best = torch.inf
    for _ in range(_ITERATIONS):
        codes = _codes(grouped, scale, zero, bits)
        errors = grouped - (codes - zero) / scale
        zero = (codes - (grouped - _shrink(errors)) * scale).mean(1, keepdim=True)
        mean = float(errors.abs().mean())
        if mean >= best:
            break
        best = mean
    return ((_codes(grouped, scale, zero, bits) - zero) / scale).view_as(weight)


def _from_range(grouped: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes per unit of weight, and the code of weight 0, of each group, [groups, 1]."""
    least, largest = grouped.amin(1, keepdim=True), grouped.amax(1, keepdim=True)
    width = largest - least
    scale = torch.where(width <= 1e-4, 1.0, (2**bits - 1) / width).clamp(max=2e4)
    return scale, -least * scale


def _codes(grouped: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> torch.Tensor:
    return (grouped * scale + zero).round().clamp(0, 2**bits - 1)


def _shrink(errors: torch.Tensor) -> torch.Tensor:
    """The generalised soft threshold of an lp norm with p below 1: small errors become 0."""
    return errors.sign() * (errors.abs() - errors.abs().pow(_POWER - 1) / _BETA).relu()
