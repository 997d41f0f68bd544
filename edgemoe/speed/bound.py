"""The bound of a step: the time that its bytes take at the rates of the memories that they come from.

    bound = max((dense + experts) / BW_vram, copied / BW_dram, read / BW_ssd)

The tiers work at the same time, so the slowest counts.
"""

from __future__ import annotations

from collections.abc import Mapping

TIERS = ("ssd", "dram", "vram")


def tier_seconds(dense: float, moved: Mapping[str, float], rates: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each tier for a step's experts, and of "dense", which comes from the fastest tier.

    >>> tier_seconds(2e9, {"ssd": 1e8, "dram": 0, "vram": 1e9}, {"ssd": 2e9, "dram": 1e10, "vram": 2e10})
    {'dense': 0.1, 'ssd': 0.05, 'dram': 0.0, 'vram': 0.05}

    Args:
        dense: bytes of dense weights.
        moved: tier -> bytes of experts.
        rates: tier -> bytes per second.
    """
    return {"dense": dense / rates["vram"], **{tier: moved[tier] / rates[tier] for tier in TIERS}}


def slowest(seconds: Mapping[str, float]) -> float:
    """The bound of a step: the time of its slowest tier. Dense weights and experts share the fastest tier's rate.

    Args:
        seconds: the result of tier_seconds.
    """
    return max(seconds["dense"] + seconds["vram"], seconds["dram"], seconds["ssd"])
