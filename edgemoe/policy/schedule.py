"""Which level each expert gets, from its importance and its layer's depth (DyMoE section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

BITS_PER_WEIGHT = {8: 8.5, 4: 4.5, 2: 2.5, 0: 0.0}
"""level -> bits read per weight, group parameters at group 64 included."""

ERROR_OF_LEVEL = {8: 0.0053, 4: 0.088, 2: 0.352, 0: 1.0}
"""level -> relative Frobenius error of a Gaussian matrix's nested code (docs/decisions/0001)."""

_PRICE_AT_ZERO_RETENTION = 0.037
"""Measured in decode on the demo model: r = 0.9 gives 3.9 bits a weight, 0.75 gives 3.5 and 0.5 gives 3.2."""

_ROUNDING = 1e-9
"""Above the rounding errors of a sum over layers, below any fraction of an expert that counts."""


def retention(layer: int, layers: int, mean: float, depth: str = "cosine") -> float:
    """r(l), the fraction of critical experts in a layer (DyMoE eq. 4).

    Args:
        layer: 0 to layers - 1.
        layers: L.
        mean: of r over the layers, (1 + lambda) / 2; so lambda = 2 mean - 1. Below 0.5, where lambda is negative, the
            cosine falls from 2 mean to 0 instead.
        depth: "cosine", or "equal" for the mean in every layer.

    Returns:
        r(l), in [0, 1].
    """
    if depth == "equal" or layers == 1:
        return mean
    top, floor = min(2 * mean, 1.0), max(2 * mean - 1, 0.0)
    return (top - floor) * (math.cos(math.pi * layer / (layers - 1)) + 1) / 2 + floor


def critical_counts(fractions: Sequence[float], chosen: int, rounding: str) -> tuple[int, ...]:
    """t_l of every layer: critical experts among the M that its router chose, at least 1 (DyMoE eq. 5).

    >>> critical_counts((1.0, 0.75, 0.5, 0.25), 2, "ceil"), critical_counts((1.0, 0.75, 0.5, 0.25), 2, "carry")
    ((2, 2, 1, 1), (2, 1, 1, 1))

    Args:
        fractions: r(l) of every layer.
        chosen: M, in each of them.
        rounding: "ceil" rounds r(l) M up, as the paper does. "carry" rounds down and carries the rest to the next
            layer, so that the mean over the layers is r.
    """
    counts, carried = [], 0.0
    for fraction in fractions:
        exact = fraction * chosen + carried
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


def by_damage(damage: torch.Tensor, levels: tuple[int, ...], price: float) -> torch.Tensor:
    """The level of least cost, damage * error(level)^2 + price * bits(level), for every expert.

    So an expert is skipped only where it hardly matters, and gets 8 bits only where they pay.

    Args:
        damage: [rows, M], the cost of leaving the expert out, 1 for an expert of mean gate weight.
        levels: high to low.
        price: damage that one bit a weight may cost; 0 gives every expert the highest level.

    Returns:
        int64 [rows, M], levels.
    """
    error, price_of = cost_of_levels(levels, price)
    cost = damage.float().unsqueeze(-1) * error + price_of
    return torch.tensor(levels)[cost.argmin(dim=-1)]


def cost_of_levels(levels: tuple[int, ...], price: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Squared error and price of each level, float32 [levels] each."""
    error = torch.tensor([ERROR_OF_LEVEL[level] ** 2 for level in levels])
    return error, price * torch.tensor([BITS_PER_WEIGHT[level] for level in levels])


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of rows [rows, 1], added from the first column to the last: the order that csrc/levels.c has."""
    total = x[:, :1]
    for column in range(1, x.shape[1]):
        total = total + x[:, column : column + 1]
    return total


def price_per_bit(layer: int, layers: int, mean: float, depth: str = "cosine") -> float:
    """The price of a bit in by_damage, from the mean retention (docs/decisions/0005).

    Falls to 0 at a retention of 1. The first layer pays half of the mean price and the last one and a half times
    it, along the cosine of DyMoE eq. 4.

    Args:
        layer: 0 to layers - 1.
        layers: of the model.
        mean: mean retention.
        depth: "cosine", or "equal" for the mean price in every layer.
    """
    return _PRICE_AT_ZERO_RETENTION * math.sqrt(1 - mean) * (1.5 - retention(layer, layers, 0.5, depth))
