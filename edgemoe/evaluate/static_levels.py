"""Levels that are the same for every token: one for each expert or layer, chosen by damage or by load."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from edgemoe.engine.engine import Engine
from edgemoe.evaluate.arm import PHASES, Arm, Variation
from edgemoe.evaluate.lynx.arms import RESIDENT_BITS
from edgemoe.policy.damage import TYPICAL_ERROR, Damage, PriceCurve, cheapest
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.base import LEVELS

ALLOCATIONS = ("experts by damage", "experts by load", "layers by damage")


def static_arms() -> list[Arm]:
    """Settings of the study: each allocation at mean bits that levels by damage are measured at too."""
    return [
        Arm(
            *(RunSettings.uniform(LEVELS[0]), PHASES[1:], "static-levels"),
            variation=Variation(f"{name}, {bits:g} bits", static=(name, bits)),
        )
        for name in ALLOCATIONS
        for bits in RESIDENT_BITS
    ]


def static_policy(engine: Engine, name: str, bits: float) -> LevelPolicy:
    """Makes the policy of an allocation for a model whose damage is known."""
    damage = engine.rules.damage
    assert damage
    limits = engine.store.manifest.geometry.level_limits
    table = {
        layer: levels.clamp(max=limits.get(layer, LEVELS[0]))
        for layer, levels in dict(allocations(damage, bits))[name].items()
    }
    return StaticPolicy(engine.settings, engine.shape.experts_per_layer, table)


class StaticPolicy(LevelPolicy):
    """A level for each expert, the same for every token.

    Args:
        settings: the settings of the highest level.
        experts: number of experts in a layer.
        table: layer -> int64 [experts], levels.
    """

    def __init__(self, settings: RunSettings, experts: int, table: dict[int, torch.Tensor]) -> None:
        super().__init__(settings, sorted(table), experts)
        self._table = table

    def levels(
        self,
        layer: int,
        choice: torch.Tensor,
        gates: torch.Tensor,
        scores: torch.Tensor | None,
        *,
        decode: bool,
    ) -> torch.Tensor:
        """The levels of the table, int64 [T, k]."""
        return self._table[layer][choice]


def allocations(damage: Damage, bits: float) -> Iterator[tuple[str, dict[int, torch.Tensor]]]:
    """Yields the name and the levels of each allocation with a mean number of bits over the sample."""
    layers, experts = damage.table.shape[:2]
    flat = damage.choices.reshape(layers, -1)
    uses = torch.zeros(layers, experts).scatter_add_(1, flat, torch.ones(flat.shape))
    squared = torch.zeros(layers, experts).scatter_add_(1, flat, damage.gates.square().reshape(layers, -1))
    each = (squared / uses.clamp_min(1)).unsqueeze(-1) * damage.table
    of_layer = (uses.unsqueeze(-1) * each).sum(1, keepdim=True) / uses.sum(1)[:, None, None]
    typical = torch.tensor([TYPICAL_ERROR[level] ** 2 for level in LEVELS])
    by_load = (uses / uses.mean(1, keepdim=True)).unsqueeze(-1) * typical
    found = {
        "experts by damage": each,
        "experts by load": by_load,
        "layers by damage": of_layer.expand(-1, experts, -1),
    }
    for name, costs in found.items():
        rows = costs[torch.arange(layers)[:, None], flat].reshape(-1, len(LEVELS))
        chosen = cheapest(costs, LEVELS, PriceCurve(rows, LEVELS).price(bits))
        yield name, dict(zip(damage.layers, chosen, strict=True))
