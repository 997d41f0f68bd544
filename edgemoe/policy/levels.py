"""Levels per token and expert: importance (DyMoE eq. 1-3) and schedule (eq. 4-5) put together, or damage and price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from types import MappingProxyType

import torch

from edgemoe.policy.damage import Damage, cheapest, prices
from edgemoe.policy.importance import expert_importance
from edgemoe.policy.schedule import level_at, ranked_levels, retention, threshold_counts
from edgemoe.policy.settings import RunSettings
from edgemoe.policy.tier_prices import TierPrices
from edgemoe.storage.base import LEVELS

UNIFORM, RANKED, PRICED = range(3)
"""Kinds of a DecodeRule, as in csrc/levels.h."""


@dataclass(frozen=True)
class DecodeRule:
    """One layer's choice of the levels of a new token's experts, in numbers that C evaluates too.

    Args:
        kind: UNIFORM, RANKED or PRICED.
        levels: high to low.
        counts: RANKED: for each level but the lowest, how many experts, the likeliest first, are at that level or
            above.
        damage: PRICED: float32 [experts, levels], contiguous.
        price: PRICED: float32 [places, levels], contiguous; level i of expert e costs gate^2 * damage[e, i] +
            price[places[e], i].
        places: PRICED: int64 [experts], contiguous, the place of each expert (tier_prices.place_of), which may change
            while the model runs; None: every expert's is 0.
    """

    kind: int
    levels: tuple[int, ...]
    counts: tuple[int, ...] = ()
    damage: torch.Tensor | None = None
    price: torch.Tensor | None = None
    places: torch.Tensor | None = None

    def by_place(self, slots: int) -> list[int]:
        """UNIFORM or RANKED: the levels of a token's experts, the likeliest first."""
        return [level_at(place, self.levels, self.counts) for place in range(slots)]


class LevelPolicy:
    """Decides at how many bits every (token, slot) pair of a layer is computed. Stateless, but for what `tiers` reads.

    >>> policy = LevelPolicy(RunSettings(levels=(4, 2), retention=0.75), layers=range(3), experts=8)
    >>> chosen, gates = torch.tensor([[5, 1, 0, 7]]), torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    >>> policy.levels(2, chosen, gates, None, decode=True).tolist()
    [[4, 4, 2, 2]]

    Args:
        settings: rule, levels, bits, retention, critical, importance, heavy_hitters, depth, speculate and compensation
            are used.
        layers: numbers of the model's layers that have experts, ascending; retention falls over these alone.
        experts: number of experts in a layer.
        damage: the damage of the model's experts.
        tiers: prices of planes for a new token by where they are, where settings go by damage and are not exact; None:
            all planes cost the same.
        limits: layer -> its highest level, of layers whose codes have fewer bits than the store's highest level.

    Raises:
        ValueError: settings that go by damage, without it.
    """

    def __init__(
        self,
        settings: RunSettings,
        layers: Sequence[int],
        experts: int,
        damage: Damage | None = None,
        tiers: TierPrices | None = None,
        limits: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        if settings.priced and damage is None:
            raise ValueError(f"expected the damage of each level for {settings.name}, got None")
        self.settings, self.experts, self.damage = settings, experts, damage
        self.limits = limits
        self._places = {layer: place for place, layer in enumerate(layers)}
        self.tiers = tiers if settings.priced and not settings.exact else None
        levels = settings.scheduled
        count = len(self._places)
        fractions = [retention(place, count, settings.retention, settings.depth) for place in range(count)]
        thresholds = 1 if settings.priced else max(len(levels) - 1, 1)
        self._counts = cache(partial(threshold_counts, fractions, thresholds, rounding=settings.critical))
        self.ahead = levels if len(levels) <= 2 else tuple(level for level in levels if level < 8)
        """The levels that are read ahead, high to low: never 8 where a schedule has more than two."""

    def levels(
        self,
        layer: int,
        choice: torch.Tensor,
        gates: torch.Tensor,
        ranks: torch.Tensor | None,
        *,
        decode: bool,
    ) -> torch.Tensor:
        """Chooses the levels of one layer.

        Args:
            layer: number of the layer in the model.
            choice: int64 [T, k], the router's experts.
            gates: [T, k], their gate weights.
            ranks: float [T], of PromptAttention.ranks; used in prefill only.
            decode: every token by its own gate weights (DyMoE eq. 3). Otherwise every expert has one level, by its
                importance to all T tokens (eq. 2).

        Returns:
            int64 [T, k].
        """
        found = self._unlimited(layer, choice, gates, ranks, decode=decode)
        return found.clamp_(max=self.limits[layer]) if layer in self.limits else found

    def _unlimited(
        self,
        layer: int,
        choice: torch.Tensor,
        gates: torch.Tensor,
        ranks: torch.Tensor | None,
        *,
        decode: bool,
    ) -> torch.Tensor:
        """The levels of one layer without its limit; arguments and result as of `levels`."""
        settings = self.settings
        if len(settings.scheduled) == 1:
            return torch.full(choice.shape, settings.scheduled[0])
        if settings.priced:
            return self._cheapest(layer, choice, gates.float(), decode=decode)
        if decode:
            return self._ranked(layer, gates.float())
        active, importance = self._importance(choice, gates, ranks)
        among = importance[active].unsqueeze(0)
        by_expert = torch.zeros(self.experts, dtype=torch.int64)
        by_expert[active] = self._ranked(layer, among)[0]
        return by_expert[choice]

    def compensated(
        self, choice: torch.Tensor, gates: torch.Tensor, ranks: torch.Tensor | None, *, decode: bool
    ) -> torch.Tensor | None:
        """Chooses the pairs of one layer that are computed with compensators, where their level has any.

        Args:
            choice, gates, ranks: see `levels`.
            decode: every token by its own gate weights. Otherwise every expert, by its importance to all T tokens.

        Returns:
            bool [T, k]; None: the settings compensate no expert.
        """
        compensation = self.settings.compensation
        if compensation is None:
            return None
        if decode:
            return compensation.of_tokens(gates)
        active, importance = self._importance(choice, gates, ranks)
        by_expert = torch.zeros(self.experts, dtype=torch.bool)
        by_expert[active] = compensation.of_experts(importance[active], choice.shape[1])
        return by_expert[choice]

    def _importance(
        self, choice: torch.Tensor, gates: torch.Tensor, ranks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts [E] that a prompt's tokens chose, and the importance of each to them."""
        settings = self.settings
        active = torch.zeros(self.experts, dtype=torch.bool)
        active[choice.reshape(-1)] = True
        return active, expert_importance(
            settings.importance, choice, gates, ranks, settings.heavy_hitters, self.experts
        )

    def _ranked(self, layer: int, importance: torch.Tensor) -> torch.Tensor:
        """The paper's levels [rows, M] of the M experts that each row chooses among."""
        return ranked_levels(importance, self.settings.levels, self.counts(layer, importance.shape[1]))

    def _cheapest(
        self, layer: int, choice: torch.Tensor, gates: torch.Tensor, *, decode: bool
    ) -> torch.Tensor:
        """The levels [T, k] of least damage and price: of each token's experts, or of each expert for all tokens."""
        levels, weights = self.settings.levels, gates * gates
        damage = self._damage(layer)
        if decode:
            price = self._prices if self.tiers is None else self._prices[self.tiers.places[layer][choice]]
            return cheapest(weights.unsqueeze(-1) * damage[choice], levels, price)
        summed = torch.zeros(self.experts).index_add_(0, choice.reshape(-1), weights.reshape(-1))
        return cheapest(summed.unsqueeze(-1) * damage, levels, self._price(len(choice)))[choice]

    def decode_rule(self, layer: int, slots: int) -> DecodeRule:
        """The rule by which `levels` chooses in decode, for a token of `slots` experts in the router's order."""
        limit = self.limits.get(layer, LEVELS[0])
        levels = tuple(min(level, limit) for level in self.settings.scheduled)
        if layer not in self._places or len(levels) == 1:
            return DecodeRule(UNIFORM, levels[:1])
        if not self.settings.priced:
            return DecodeRule(RANKED, levels, self.counts(layer, slots))
        held = self.tiers.places[layer] if self.tiers else None
        return DecodeRule(PRICED, levels, (), self._damage(layer), self._prices, held)

    def predicted(
        self, layer: int, rows: Sequence[Sequence[int]], by_rule: Sequence[Sequence[int]] | None = None
    ) -> dict[int, int]:
        """Levels to read ahead for a layer's predicted experts, the likeliest of all rows first; skipped ones left out.

        They are the rule's levels, as far as `ahead` goes. Without gate weights only the order in a row counts: its
        critical ones get the highest level of `ahead`, the others the level below it. An expert of several rows gets
        the highest of their levels.

        Args:
            layer: number of the layer in the model.
            rows: the result of lookahead.predict: experts of each sequence's token or of a prompt, the likeliest first.
            by_rule: the level of each, by the rule and the predicted gate weights; None: there are no such weights.
        """
        by_order: dict[int, int] = {}
        taken = [self.taken(layer, experts) for experts in rows]
        levels = by_rule or [self._by_order(layer, len(experts)) for experts in rows]
        highest = min(self.ahead[0], self.limits.get(layer, LEVELS[0]))
        for i in range(max(map(len, taken), default=0)):
            for experts, of_row in zip(taken, levels, strict=True):
                if i < len(experts):
                    level = min(of_row[i], highest)
                    by_order[experts[i]] = max(level, by_order.get(experts[i], 0))
        return {expert: level for expert, level in by_order.items() if level}

    def _by_order(self, layer: int, count: int) -> list[int]:
        """Levels for the experts of a row by their order: the paper's, or levels of `ahead`."""
        if self.settings.rule == "paper" and len(self.ahead) > 1:
            counts = self.counts(layer, count)
            return [level_at(place, self.settings.levels, counts) for place in range(count)]
        levels = self.ahead
        critical = count if len(levels) == 1 else self.critical(layer, count)
        return [levels[0]] * critical + [levels[-1] if len(levels) == 1 else levels[1]] * (count - critical)

    def taken(self, layer: int, experts: Sequence[int]) -> Sequence[int]:
        """The predicted experts, the likeliest first, that settings take: all, or the critical (t of eq. 7 and 8)."""
        every = len(self.ahead) == 1 or self.settings.speculate != "critical"
        return experts if every else experts[: self.critical(layer, len(experts))]

    def critical(self, layer: int, count: int) -> int:
        """t_l, how many of the M chosen experts of a layer are above the lowest level (DyMoE eq. 5)."""
        return self.counts(layer, count)[-1]

    def counts(self, layer: int, count: int) -> tuple[int, ...]:
        """How many of the M chosen experts of a layer are at each level or above, but for the lowest level."""
        return self._counts(experts=count)[self._places[layer]]

    def _damage(self, layer: int) -> torch.Tensor:
        """Damage [experts, levels] of a layer's experts for a gate weight of 1."""
        assert self.damage
        return self.damage.of_layer(layer, self.settings.levels)

    @cached_property
    def _prices(self) -> torch.Tensor:
        """The price of each level for a new token, at each place: float32 [places, levels]."""
        levels = self.settings.levels
        if self.tiers is None:
            return prices(levels, self._price(0)).unsqueeze(0)
        return self._price(0) * self.tiers.paid_bits(levels)

    def _price(self, tokens: int) -> float:
        """The price of a bit for a prompt of `tokens` tokens; 0: for single tokens."""
        assert self.damage
        return self.damage.price(self.settings.levels, self.settings.mean_bits, tokens)


class SkipEveryExpert(LevelPolicy):
    """Level 0 for every pair, and nothing to read ahead: a step of the dense weights alone."""

    def levels(
        self,
        layer: int,
        choice: torch.Tensor,
        gates: torch.Tensor,
        ranks: torch.Tensor | None,
        *,
        decode: bool,
    ) -> torch.Tensor:
        """Zeros [T, k]."""
        return torch.zeros_like(choice)

    def predicted(
        self, layer: int, rows: Sequence[Sequence[int]], by_rule: Sequence[Sequence[int]] | None = None
    ) -> dict[int, int]:
        """Nothing."""
        return {}
