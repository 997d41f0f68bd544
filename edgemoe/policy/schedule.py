"""The level of each expert, from its importance and its layer's depth (DyMoE section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_ROUNDING = 1e-9
"""Above the rounding errors of a sum over layers, below any fraction of an expert that counts."""


def retention(layer: int, layers: int, mean: float, depth: str = "cosine") -> float:
    """r(l), the fraction of critical experts in a layer (DyMoE eq. 4).

    Args:
        layer: place among the layers that have experts, 0 to layers - 1.
        layers: L, number of layers with experts.
        mean: mean of r over the layers, (1 + lambda) / 2; so lambda = 2 mean - 1. Below 0.5, where lambda is negative,
            the cosine falls from 2 mean to 0 instead.
        depth: "cosine", or "equal" for the mean in every layer.

    Returns:
        r(l), in [0, 1].
    """
    if depth == "equal" or layers == 1:
        return mean
    top, floor = min(2 * mean, 1.0), max(2 * mean - 1, 0.0)
    return (top - floor) * (math.cos(math.pi * layer / (layers - 1)) + 1) / 2 + floor


def critical_counts(fractions: Sequence[float], experts: int, rounding: str) -> tuple[int, ...]:
    """t_l of every layer: critical experts among the M that its router chose, at least 1 (DyMoE eq. 5).

    >>> critical_counts((1.0, 0.75, 0.5, 0.25), 2, "ceil"), critical_counts((1.0, 0.75, 0.5, 0.25), 2, "carry")
    ((2, 2, 1, 1), (2, 1, 1, 1))

    Args:
        fractions: r(l) of every layer.
        experts: M, number of chosen experts in each layer.
        rounding: "ceil" rounds r(l) M up, as the paper does. "carry" rounds down and carries the rest to the next
            layer, so that the mean over the layers is r.
    """
    counts, carried = [], 0.0
    for fraction in fractions:
        exact = fraction * experts + carried
        # 0.75 * 8 must be 6 even where the product or a sum has a rounding error.
        count = max(math.ceil(exact - _ROUNDING) if rounding == "ceil" else math.floor(exact + _ROUNDING), 1)
        counts.append(count)
        carried = exact - count if rounding == "carry" else 0.0
    return tuple(counts)


def two_levels(importance: torch.Tensor, high: int, low: int, count: int) -> torch.Tensor:
    """The paper's rule: the most important experts of each row get the high level.

    Args:
        importance: [rows, M]; the first of equals is the more important.
        high, low: levels.
        count: t_l, critical experts of a row.

    Returns:
        int64 [rows, M], levels.
    """
    if count >= importance.shape[1]:
        return torch.full(importance.shape, high)
    order = importance.argsort(dim=1, descending=True, stable=True)
    return torch.full(importance.shape, low).scatter_(1, order[:, :count], high)


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of rows [rows, 1], added from the first column to the last: the order that csrc/levels.c has."""
    total = x[:, :1]
    for column in range(1, x.shape[1]):
        total = total + x[:, column : column + 1]
    return total
