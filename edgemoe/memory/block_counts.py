"""How many blocks of each kind a tier's bytes are split into."""

from __future__ import annotations

from collections.abc import Mapping

from edgemoe.policy.settings import RunSettings
from storage.base import BlockKind


def fraction_at(settings: RunSettings, level: int) -> float:
    """Expected fraction, 0 to 1, of an average layer's unskipped experts that `settings` puts at `level` or above."""
    kept = [bits for bits in settings.levels if bits]
    if level <= kept[-1]:
        return 1.0
    if len(settings.levels) == 2:
        return settings.retention
    # With more levels gate weights decide, which are unknown here; measured on text (docs/decisions/0005).
    return settings.retention if level < 8 else max(2 * settings.retention - 1, 0.1)


def count_blocks(size: int, fractions: Mapping[BlockKind, float], most: int, fewest: int) -> dict[str, int]:
    """Splits `size` bytes into blocks.

    Args:
        size: bytes, enough for `fewest` blocks of every kind.
        fractions: kind -> blocks per block of the first kind, lowest kind first.
        most: upper limit of a kind's blocks.
        fewest: lower limit of a kind's blocks.

    Returns:
        kind's name -> blocks, together at most `size` bytes.
    """
    kinds = list(fractions)
    unit = sum(kind.size * fraction for kind, fraction in fractions.items())
    counts = {
        kind: max(min(int(size / unit * fraction), most), fewest) for kind, fraction in fractions.items()
    }

    def free_bytes() -> int:
        return size - sum(kind.size * count for kind, count in counts.items())

    # `fewest` blocks of a rare kind may exceed its fraction: the first kind has fewer then.
    counts[kinds[0]] -= max(-(free_bytes() // kinds[0].size), 0)
    if unit < sum(kind.size for kind in kinds):
        limit = most
        for kind in kinds:
            counts[kind] += max(min(free_bytes() // kind.size, limit - counts[kind]), 0)
            limit = counts[kind]
    return {kind.name: count for kind, count in counts.items()}
