"""The level of each expert, from its importance and its layer's depth (DyMoE section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

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


def threshold_counts(
    fractions: Sequence[float], thresholds: int, experts: int, rounding: str
) -> tuple[tuple[int, ...], ...]:
    """How many of M experts in every layer are at each level or above, but for the lowest level, which has the others.

    Eq. 5 gives the experts above the lowest level. Each level above it has r(l) of those: with four levels r(l) M
    experts are above the lowest, r(l)^2 M above the lowest but one, and r(l)^3 M at the highest.

    >>> threshold_counts((1.0, 0.5), 3, 8, "ceil")
    ((8, 8, 8), (1, 2, 4))

    Args:
        fractions: r(l) of every layer.
        thresholds: number of levels, less one.
        experts: M, number of chosen experts in each layer.
        rounding: "ceil" or "carry", which critical_counts describes; each threshold carries its own rest.

    Returns:
        for each layer the counts of its levels, high to low, which never fall.
    """
    by_threshold = [
        critical_counts([fraction**power for fraction in fractions], experts, rounding)
        for power in range(1, thresholds + 1)
    ]
    # Each threshold carries its own rests, so a higher level's count may be above a lower one's in single layers.
    return tuple(tuple(accumulate(counts, min))[::-1] for counts in zip(*by_threshold, strict=True))


def ranked_levels(importance: torch.Tensor, levels: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """The paper's rule: the most important experts of each row get the highest level, and so on.

    Args:
        importance: [rows, M]; the first of equals is the more important.
        levels: high to low.
        counts: experts per row at each level or above, without the lowest level.

    Returns:
        int64 [rows, M], levels.
    """
    by_place = torch.tensor([level_at(place, levels, counts) for place in range(importance.shape[1])])
    order = importance.argsort(dim=1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(1, order, by_place.expand_as(order))


def level_at(place: int, levels: Sequence[int], counts: Sequence[int]) -> int:
    """The level of the expert at one place among the experts of a row, the most important of which is at place 0."""
    return levels[sum(place >= count for count in counts)]


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of rows [rows, 1], added from the first column to the last: the order that csrc/levels.c has."""
    total = x[:, :1]
    for column in range(1, x.shape[1]):
        total = total + x[:, column : column + 1]
    return total
