"""How many blocks of each kind a tier's bytes are split into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from edgemoe.policy.damage import Damage
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import BlockKind

SAMPLE_TOKENS = 256

SAMPLE_SPREAD = 2.5
"""Standard deviation of the sample's router logits: with it the fractions are near the demo model's (decision 0023)."""

HOT_FRACTION = 0.25
"""Blocks of upper planes per resident expert where not all experts fit at the lower level of precision by hotness."""


def fraction_at(
    settings: RunSettings,
    level: int,
    *,
    layers: int,
    experts: int,
    top_k: int,
    damage: Damage | None = None,
) -> float:
    """Expected fraction, 0 to 1, of a new token's unskipped experts that `settings` puts at `level` or above.

    Without damage, levels put a known number of each layer's experts there. Where damage decides and is not known yet,
    typical errors and the gate weights of SAMPLE_TOKENS random tokens stand for it.

    Args:
        settings: the settings; their levels and options that rank experts are used.
        level: a level above 0.
        layers: number of layers with experts.
        experts: number of experts in a layer.
        top_k: experts of a token.
        damage: the damage of the model's experts, with a sample of its routing; None: it is not known yet.
    """
    kept = [bits for bits in settings.levels if bits]
    if settings.hotness and level > kept[-1]:
        most = settings.hotness.experts
        return HOT_FRACTION if most is None else min(HOT_FRACTION, most / experts)
    if level <= kept[-1]:
        return 1.0
    known = damage or _typical(layers, experts, top_k)
    policy = LevelPolicy(settings, known.layers, experts, known)
    if not settings.priced:
        counts = [policy.counts(layer, top_k) for layer in known.layers]
        unskipped = len(counts) * top_k if settings.levels[-1] else sum(each[-1] for each in counts)
        above = sum(have >= level for have in settings.levels)  # a kind of planes may be between two levels
        return sum(each[above - 1] for each in counts) / unskipped
    every = max(known.choices.shape[1] // SAMPLE_TOKENS, 1)
    sample = zip(known.layers, known.choices[:, ::every], known.gates[:, ::every], strict=True)
    levels = torch.stack([policy.levels(*each, None, decode=True) for each in sample])
    return int((levels >= level).sum()) / max(int((levels > 0).sum()), 1)


def _typical(layers: int, experts: int, top_k: int) -> Damage:
    """Typical errors, and the choices and gate weights of SAMPLE_TOKENS random tokens."""
    logits = SAMPLE_SPREAD * torch.randn(SAMPLE_TOKENS, experts, generator=torch.Generator().manual_seed(0))
    gates, chosen = logits.softmax(-1).topk(top_k)
    return Damage.typical(range(layers), experts, chosen, gates)


def count_hot_blocks(
    size: int, kinds: Sequence[BlockKind], lowest: int, limit: int, hottest: int
) -> dict[str, int] | None:
    """Splits `size` bytes so that all experts have the lower level, and as many as possible the higher one.

    Args:
        size: bytes of the tier.
        kinds: the kinds of the higher level, lowest first.
        lowest: the lower level.
        limit: number of experts.
        hottest: most experts that may have the higher level.

    Returns:
        kind's name -> blocks; None: not all experts fit at the lower level.
    """
    every, upper = ([k.size for k in kinds if (k.level > lowest) == above] for above in (False, True))
    left = size - limit * sum(every)
    if left < 0:
        return None
    hot = min(left // sum(upper), hottest)
    return {kind.name: hot if kind.level > lowest else limit for kind in kinds}


def count_blocks(
    size: int, fractions: Mapping[BlockKind, float], ceiling: int, fewest: int
) -> dict[str, int]:
    """Splits `size` bytes into blocks.

    Args:
        size: bytes, enough for `fewest` blocks of every kind.
        fractions: kind -> blocks per block of the first kind, lowest kind first.
        ceiling: upper limit of a kind's blocks.
        fewest: lower limit of a kind's blocks.

    Returns:
        kind's name -> blocks, together at most `size` bytes.
    """
    kinds = list(fractions)
    unit = sum(kind.size * fraction for kind, fraction in fractions.items())
    counts = {
        kind: max(min(int(size / unit * fraction), ceiling), fewest) for kind, fraction in fractions.items()
    }

    def free_bytes() -> int:
        return size - sum(kind.size * count for kind, count in counts.items())

    # `fewest` blocks of a rare kind may exceed its fraction: the first kind has fewer then.
    counts[kinds[0]] -= max(-(free_bytes() // kinds[0].size), 0)
    if unit < sum(kind.size for kind in kinds):
        limit = ceiling
        for kind in kinds:
            counts[kind] += max(min(free_bytes() // kind.size, limit - counts[kind]), 0)
            limit = counts[kind]
    return {kind.name: count for kind, count in counts.items()}
