"""Bits that a level reads, and the bits that a retention stands for."""

from __future__ import annotations

BITS_PER_WEIGHT = {8: 8.5, 4: 4.5, 2: 2.5, 0: 0.0}
"""level -> bits read per weight, group parameters at group 64 included."""

BITS_OF_RETENTION = {0.5: 3.2, 0.75: 3.5, 0.9: 3.9}
"""Mean retention -> bits per weight of a choice by damage; straight lines lie between, and end at the outer levels."""


def bits_of_retention(mean: float, levels: tuple[int, ...]) -> float:
    """The mean bits per weight that a mean retention stands for where levels go by damage.

    Args:
        mean: retention, above 0, at most 1.
        levels: the levels that are chosen from, high to low.
    """
    low, high = BITS_PER_WEIGHT[levels[-1]], BITS_PER_WEIGHT[levels[0]]
    known = {0.0: low, 1.0: high} | {r: min(max(bits, low), high) for r, bits in BITS_OF_RETENTION.items()}
    below = max(r for r in known if r <= mean)
    above = min(r for r in known if r >= mean)
    part = (mean - below) / (above - below) if above > below else 0.0
    return known[below] + part * (known[above] - known[below])
