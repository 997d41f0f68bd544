"""How a tier's bytes are cut into blocks of the kinds that its settings will ask for."""

from __future__ import annotations

from collections.abc import Mapping

from edgemoe.policy.settings import RunSettings
from storage.base import BlockKind


def share_at(settings: RunSettings, level: int) -> float:
    """Share of an average layer's kept experts that the settings ask at `level` or above."""
    kept = [bits for bits in settings.levels if bits]
    if level <= kept[-1]:
        return 1.0
    if len(settings.levels) == 2:
        return settings.retention
    # More levels go by gate weights, which no plan can know; measured on real text (docs/decisions/0005).
    return settings.retention if level < 8 else max(2 * settings.retention - 1, 0.1)


def divide(size: int, shares: Mapping[BlockKind, float], most: int, fewest: int) -> dict[str, int]:
    """How many blocks of each kind `size` bytes are split into.

    Args:
        size: bytes, enough for `fewest` blocks of every kind.
        shares: kind -> blocks wanted for each block of the first kind.
        most, fewest: blocks of a kind.

    Returns:
        kind's name -> blocks, adding up to at most `size`.
    """
    kinds = list(shares)
    unit = sum(kind.size * shares[kind] for kind in kinds)
    counts = {kind: max(min(int(size / unit * shares[kind]), most), fewest) for kind in kinds}

    def left() -> int:
        return size - sum(kind.size * count for kind, count in counts.items())

    # The fewest of a rare kind may have been too many beside so many of the first.
    counts[kinds[0]] -= max(-(left() // kinds[0].size), 0)
    if unit < sum(kind.size for kind in kinds):
        limit = most
        for kind in kinds:
            counts[kind] += max(min(left() // kind.size, limit - counts[kind]), 0)
            limit = counts[kind]
    return {kind.name: count for kind, count in counts.items()}
