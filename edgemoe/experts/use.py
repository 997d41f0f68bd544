"""The bits of each expert in each tier, as rules of levels read them, and counts of the experts that steps computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.policy.bits import BITS_PER_WEIGHT
from edgemoe.policy.damage import Damage
from edgemoe.policy.tier_prices import HELD_LEVELS, place_of
from edgemoe.prefetch.base import PinnedExperts
from edgemoe.storage.base import Blocks, ExpertKey


class ChoiceCounts:
    """Counts of routers' choices: by the compiled kernel in fused decode, and by ExpertLayer elsewhere.

    >>> choices = ChoiceCounts(layers=1, experts=3)
    >>> choices.add(0, torch.tensor([[2, 0], [2, 1]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]]))
    >>> choices.counts.tolist(), choices.mass.tolist()
    ([[1.0, 1.0, 2.0]], [[0.25, 0.5, 1.25]])

    Args:
        layers, experts: number of layers of the model, and of experts in a layer.

    Attributes:
        counts: float64 [layers, experts], tokens that chose an expert.
        mass: float64 [layers, experts], the sums of their gate weights.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self.counts, self.mass = np.zeros((layers, experts)), np.zeros((layers, experts))

    def add(self, layer: int, choice: torch.Tensor, gates: torch.Tensor) -> None:
        """Adds the choice of some tokens: int64 [T, k] experts and their gate weights [T, k]."""
        experts, count = choice.reshape(-1).numpy(), self.counts.shape[1]
        self.counts[layer] += np.bincount(experts, minlength=count)
        self.mass[layer] += np.bincount(experts, gates.reshape(-1).double().numpy(), minlength=count)

    def add_token(
        self, layers: Sequence[int], choice: npt.NDArray[np.int64], gates: npt.NDArray[np.float32]
    ) -> None:
        """Adds the choice of one token in several layers.

        >>> choices = ChoiceCounts(layers=2, experts=3)
        >>> choices.add_token([0, 1], np.array([[2, 0], [1, 2]]), np.float32([[0.75, 0.25], [0.5, 0.5]]))
        >>> choices.counts.tolist(), choices.mass.tolist()
        ([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], [[0.25, 0.0, 0.75], [0.0, 0.5, 0.5]])

        Args:
            layers: indices of the layers.
            choice: [layers, k], experts, none of them twice in a layer.
            gates: [layers, k], their gate weights.
        """
        rows = np.asarray(layers)[:, None]
        self.counts[rows, choice] += 1
        self.mass[rows, choice] += gates

    def merge(self, other: ChoiceCounts) -> None:
        """Adds the counts of another one."""
        self.counts += other.counts
        self.mass += other.mass

    def clear(self) -> None:
        """Sets all counts to 0, in place."""
        self.counts[:] = 0
        self.mass[:] = 0


@dataclass
class ExpertUse:
    """Levels at which experts were computed.

    An expert counts once a layer, step and level.

    >>> use = ExpertUse()
    >>> use.add([(4, 8, 1), (0, 0, 2)])
    >>> use.experts, use.reused, use.scheduled
    ({8: 1, 0: 1}, 1, {4: 1, 0: 2})
    """

    experts: dict[int, int] = field(default_factory=dict)
    """Level computed at -> experts; at 0 the skipped ones."""
    reused: int = 0
    """Experts computed at more bits than scheduled, because their planes were resident (conservative reuse)."""
    scheduled: dict[int, int] = field(default_factory=dict)
    """Level scheduled -> (token, slot) pairs."""
    damage: float = 0.0
    """Estimated KL of new tokens at their scheduled levels, in nats, summed; 0 where levels do not go by damage."""
    active_before: int = 0
    """Experts that the tokens of remapped steps chose by themselves, each once a layer and step."""
    active: int = 0
    """Experts that they agreed on."""
    remapped: int = 0
    """(token, slot) pairs whose expert the token did not choose by itself."""
    compensated: int = 0
    """(token, slot) pairs that were computed with a compensator."""
    compensated_experts: int = 0
    """Experts that were computed with a compensator; an expert counts once per layer, step and level."""
    compensator_bits: float = 0.0
    """Bits per weight of the compensators of `compensated_experts`, summed: they add to the bits of `experts`."""
    compensator_bits_of_pairs: float = 0.0
    """Bits per weight of the compensators of `compensated`, summed: they add to the bits of `scheduled`."""

    def add(self, experts: Iterable[tuple[int, int, int]]) -> None:
        """Counts experts, each as (level scheduled, level computed, rows)."""
        by_level, scheduled = self.experts, self.scheduled
        for wanted, computed, rows in experts:
            by_level[computed] = by_level.get(computed, 0) + 1
            scheduled[wanted] = scheduled.get(wanted, 0) + rows
            self.reused += computed > wanted

    def add_alike(self, level: int, computed: int, experts: int) -> None:
        """Counts experts of one row each, all scheduled at one level and computed at one level."""
        self.experts[computed] = self.experts.get(computed, 0) + experts
        self.scheduled[level] = self.scheduled.get(level, 0) + experts
        self.reused += experts if computed > level else 0

    def add_damage(
        self,
        damage: Damage | None,
        layers: Sequence[int],
        choice: torch.Tensor,
        gates: torch.Tensor,
        levels: torch.Tensor,
    ) -> None:
        """Counts the estimated KL of new tokens whose experts are computed at some levels.

        Args:
            damage: the damage of the model's experts; levels go by it, so there is one.
            layers: the number of each row's layer, which has experts.
            choice: int64 [rows, k], experts.
            gates: [rows, k], their gate weights.
            levels: int64 [rows, k].
        """
        assert damage
        each = damage.by_level[torch.tensor(layers)[:, None], choice, levels]
        self.damage += float((gates.float().square() * each).sum())

    def add_compensated(self, bits: float, pairs: int) -> None:
        """Counts an expert whose compensator adds so many bits per weight, and the pairs that were computed with it."""
        self.compensated += pairs
        self.compensated_experts += 1
        self.compensator_bits += bits
        self.compensator_bits_of_pairs += bits * pairs

    @property
    def bits_computed(self) -> float | None:
        """Mean bits per weight of `experts`, compensators included; None without experts."""
        return mean_bits(self.experts, self.compensator_bits)

    @property
    def bits_scheduled(self) -> float | None:
        """Mean bits per weight of the pairs of `scheduled`, compensators included; None without pairs."""
        return mean_bits(self.scheduled, self.compensator_bits_of_pairs)

    @property
    def compensation(self) -> dict[str, int]:
        """The counts of `add_compensated`, by name."""
        return {"pairs": self.compensated, "experts": self.compensated_experts}

    def add_remapped(self, before: int, after: int, pairs: int) -> None:
        """Counts a layer whose tokens have agreed: active_before, active and remapped."""
        self.active_before += before
        self.active += after
        self.remapped += pairs

    @property
    def agreement(self) -> dict[str, int]:
        """The counts of `add_remapped`, by name."""
        return {name: getattr(self, name) for name in ("active_before", "active", "remapped")}

    def __add__(self, other: ExpertUse) -> ExpertUse:
        """Adds two counts up."""
        return ExpertUse(
            _summed(self.experts, other.experts),
            self.reused + other.reused,
            _summed(self.scheduled, other.scheduled),
            self.damage + other.damage,
            self.active_before + other.active_before,
            self.active + other.active,
            self.remapped + other.remapped,
            self.compensated + other.compensated,
            self.compensated_experts + other.compensated_experts,
            self.compensator_bits + other.compensator_bits,
            self.compensator_bits_of_pairs + other.compensator_bits_of_pairs,
        )


def _summed(mine: dict[int, int], theirs: dict[int, int]) -> dict[int, int]:
    return {level: mine.get(level, 0) + theirs.get(level, 0) for level in mine | theirs}


def mean_bits(counts: Mapping[int, int], more: float = 0.0) -> float | None:
    """Mean bits per weight of counts by level, and `more` in all; None where all counts are 0."""
    total = sum(counts.values())
    bits = math.fsum(BITS_PER_WEIGHT[level] * n for level, n in counts.items())
    return (bits + more) / total if total else None


def fraction_at(counts: Mapping[int, int], high: int) -> float | None:
    """Fraction of counts by level that is at `high` or above; None where all are 0."""
    total = sum(counts.values())
    return sum(n for level, n in counts.items() if level >= high) / total if total else None


_PLACES = {(own, slower): place_of(own, slower) for own in HELD_LEVELS for slower in HELD_LEVELS}
"""(level in the fastest tier, level in DRAM) -> place."""


class HeldExperts:
    """The place of every expert (policy.tier_prices.place_of), kept up by the tiers themselves.

    Args:
        pinned: the resident experts of the tiers.
        layers, experts: number of layers of the model, and of experts in a layer.

    Attributes:
        places: int64 [layers, experts]; changes whenever an expert arrives, changes its level or goes.
        levels: int64 [layers, experts], each expert's level in the fastest tier, 0 where absent; changes as `places`.
    """

    def __init__(self, pinned: PinnedExperts, layers: int, experts: int) -> None:
        self.levels, self._slow = np.zeros((2, layers, experts), np.int64)
        places = np.zeros((layers, experts), np.int64)
        self.places, self._places = torch.from_numpy(places), places
        pinned.observe(self._fastest)
        pinned.observe_slower(self._slower)

    def _fastest(self, key: ExpertKey, level: int, blocks: Blocks) -> None:
        self.levels[key] = level
        self._places[key] = _PLACES[level, self._slow[key]]

    def _slower(self, key: ExpertKey, level: int, blocks: Blocks) -> None:
        self._slow[key] = level
        self._places[key] = _PLACES[self.levels[key], level]
