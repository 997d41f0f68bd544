"""Levels per token and expert: settings, importance and schedule put together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from edgemoe.policy.importance import expert_importance
from edgemoe.policy.schedule import BITS_PER_WEIGHT, by_damage, critical, price_per_bit, retention, two_levels
from edgemoe.policy.settings import RunSettings


class LevelPolicy:
    """Decides how many bits every (token, slot) pair of a layer is computed at. Stateless.

    Args:
        settings: levels, retention, importance, heavy_hitters, depth and only_layer are used.
        layers: of the model.
        experts: in a layer.
    """

    def __init__(self, settings: RunSettings, layers: int, experts: int) -> None:
        self.settings, self.experts, self._layers = settings, experts, layers
        self.uniform: int | None = settings.levels[0] if len(settings.levels) == 1 else None
        """The one level of everything, or None."""

    def levels(
        self,
        layer: int,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        scores: torch.Tensor | None,
        *,
        decode: bool,
    ) -> torch.Tensor:
        """Levels of one layer.

        Args:
            layer: of the model.
            top_k_index: int64 [T, k], the router's experts.
            top_k_weights: [T, k], their gate weights.
            scores: float [T], attention received (importance.token_scores); used in prefill only.
            decode: every token by its own gate weights (DyMoE eq. 3). Otherwise every expert has one level,
                by its importance to all T tokens (eq. 2).

        Returns:
            int64 [T, k].
        """
        settings = self.settings
        if self.uniform is not None or settings.only_layer not in (None, layer):
            return torch.full(top_k_index.shape, settings.levels[0])
        if decode:
            weights = top_k_weights.float()
            relative = weights / weights.mean(dim=1, keepdim=True)
            return self._scheduled(layer, weights, relative.square())
        importance = expert_importance(
            settings.importance, top_k_index, top_k_weights, scores, settings.heavy_hitters, self.experts
        )
        active = torch.zeros(self.experts, dtype=torch.bool)
        active[top_k_index.reshape(-1)] = True
        among = importance[active].unsqueeze(0)
        by_expert = torch.zeros(self.experts, dtype=torch.int64)
        by_expert[active] = self._scheduled(layer, among, among / among.mean())[0]
        return by_expert[top_k_index]

    def _scheduled(self, layer: int, importance: torch.Tensor, damage: torch.Tensor) -> torch.Tensor:
        """Levels [rows, M] of the M experts that each row chooses among."""
        settings = self.settings
        depth = layer, self._layers, settings.retention, settings.depth
        if len(settings.levels) == 2:
            return two_levels(importance, *settings.levels, retention(*depth))
        return by_damage(damage, settings.levels, price_per_bit(*depth))

    def predicted(self, layer: int, experts: Sequence[int]) -> dict[int, int]:
        """Levels to read ahead for a layer's predicted experts, the likeliest first; skipped ones left out.

        Their gate weights are a guess, so this goes by order alone: the critical ones at the highest level
        but never at 8 where others are to be had, the rest at the one below.
        """
        levels = self.settings.levels
        if len(levels) > 2:
            levels = tuple(level for level in levels if level < 8)
        share = retention(layer, self._layers, self.settings.retention, self.settings.depth)
        count = len(experts) if len(levels) == 1 else critical(share, len(experts))
        by_order = {e: levels[0] if i < count else levels[1] for i, e in enumerate(experts)}
        return {expert: level for expert, level in by_order.items() if level}


@dataclass
class ExpertUse:
    """What experts were computed at, since it was last taken. An expert counts once a layer, step and level."""

    experts: dict[int, int] = field(default_factory=dict)
    """Level computed at -> experts; 0 are the skipped ones."""
    reused: int = 0
    """Experts computed at more bits than scheduled, because their planes were there (conservative reuse)."""
    scheduled: dict[int, int] = field(default_factory=dict)
    """Level scheduled -> (token, slot) pairs."""

    def computed_at(self, level: int, *, scheduled: int) -> None:
        """Counts one expert."""
        self.experts[level] = self.experts.get(level, 0) + 1
        self.reused += level > scheduled

    def scheduled_at(self, level: int, pairs: int) -> None:
        """Counts (token, slot) pairs."""
        self.scheduled[level] = self.scheduled.get(level, 0) + pairs

    def skipped(self, experts: int, pairs: int) -> None:
        """Counts experts at level 0, and their (token, slot) pairs."""
        self.experts[0] = self.experts.get(0, 0) + experts
        self.scheduled_at(0, pairs)

    def of_one_token(self, scheduled: Sequence[int], computed: Sequence[int]) -> None:
        """Counts a token's experts, each scheduled at one level and computed at another or the same."""
        for wanted, used in zip(scheduled, computed, strict=True):
            self.scheduled_at(wanted, 1)
            self.computed_at(used, scheduled=wanted)

    def held_at(self, computed: Mapping[int, int], *, scheduled: int) -> None:
        """Counts single tokens' experts, by the level that they were computed at; all were scheduled at one."""
        for level, count in computed.items():
            self.experts[level] = self.experts.get(level, 0) + count
            self.reused += count if level > scheduled else 0
            self.scheduled_at(scheduled, count)

    def __add__(self, other: ExpertUse) -> ExpertUse:
        """Both together."""

        def both(mine: dict[int, int], theirs: dict[int, int]) -> dict[int, int]:
            return {level: mine.get(level, 0) + theirs.get(level, 0) for level in mine | theirs}

        return ExpertUse(
            both(self.experts, other.experts),
            self.reused + other.reused,
            both(self.scheduled, other.scheduled),
        )


def mean_bits(counts: Mapping[int, int]) -> float | None:
    """Mean bits a weight of counts by level; None of nothing."""
    total = sum(counts.values())
    return math.fsum(BITS_PER_WEIGHT[level] * n for level, n in counts.items()) / total if total else None


def share_at(counts: Mapping[int, int], high: int) -> float | None:
    """Share of counts by level that is at `high` or above; None of nothing."""
    total = sum(counts.values())
    return sum(n for level, n in counts.items() if level >= high) / total if total else None
