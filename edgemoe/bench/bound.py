"""What the bytes moved would take at the measured bandwidths, if everything overlapped that can.

bound = dense / BW_vram + max(experts / BW_vram, copied / BW_dram, read / BW_ssd)

Dense weights are computed before a layer's experts are known, so their time comes on top; the tiers work at the
same time, so the slowest of them counts. Bytes are those that were moved, cache hits taken off. The disk's
bandwidth is the best of probes and of what prompts read in their time. What is read ahead is read beside
the dense weights too: with prefetch, less than this is possible, if only by the dense weights' time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TIERS = ("ssd", "dram", "vram")


@dataclass(frozen=True)
class Bound:
    """Least seconds a decoded token, without reading ahead.

    Args:
        dense_s: reading the dense weights.
        tiers_s: tier -> seconds for its share of the experts' bytes.
    """

    dense_s: float
    tiers_s: dict[str, float]

    @property
    def total_s(self) -> float:
        """The bound."""
        return self.dense_s + max(self.tiers_s.values())


def bound_of(dense_bytes: float, expert_bytes: Mapping[str, float], bandwidth: Mapping[str, float]) -> Bound:
    """The bound of one token.

    Args:
        dense_bytes: of dense weights.
        expert_bytes: tier -> bytes of experts.
        bandwidth: tier -> bytes a second, above 0.
    """
    return Bound(
        dense_bytes / bandwidth["vram"], {tier: expert_bytes[tier] / bandwidth[tier] for tier in TIERS}
    )
