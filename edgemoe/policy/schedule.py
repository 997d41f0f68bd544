"""Which level each expert gets, from its importance and its layer's depth (DyMoE section 4.3)."""

from __future__ import annotations

import math

import torch


def retention(layer: int, layers: int, mean: float, depth: str = "cosine") -> float:
    """r(l), the fraction of critical experts in a layer (DyMoE eq. 4).

    Args:
        layer: 0 to layers - 1.
        layers: L.
        mean: of r over the layers, (1 + lambda) / 2; so lambda = 2 mean - 1.
        depth: "cosine", or "equal" for the mean in every layer.

    Returns:
        r(l), in [0, 1].
    """
    if depth == "equal" or layers == 1:
        return mean
    floor = 2 * mean - 1
    return (1 - floor) * (math.cos(math.pi * layer / (layers - 1)) + 1) / 2 + floor


def critical(fraction: float, chosen: int) -> int:
    """t_l = ceil(r(l) M), the number of critical experts among the M that the router chose (DyMoE eq. 5)."""
    # 0.75 * 8 must be 6 even where the product has a rounding error above it.
    return math.ceil(fraction * chosen - 1e-9)


def two_levels(importance: torch.Tensor, high: int, low: int, fraction: float) -> torch.Tensor:
    """The paper's rule: the most important ceil(r M) experts of each row get the high level.

    Args:
        importance: [rows, M]; the first of equals is the more important.
        high, low: levels.
        fraction: r(l).

    Returns:
        int64 [rows, M], levels.
    """
    chosen = importance.shape[1]
    count = critical(fraction, chosen)
    if count >= chosen:
        return torch.full(importance.shape, high)
    order = importance.argsort(dim=1, descending=True, stable=True)
    return torch.full(importance.shape, low).scatter_(1, order[:, :count], high)


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of rows [rows, 1], added from the first column to the last: the order that csrc/levels.c has."""
    total = x[:, :1]
    for column in range(1, x.shape[1]):
        total = total + x[:, column : column + 1]
    return total
