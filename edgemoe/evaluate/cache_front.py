"""The worth of a cache miss: bits read from disk and KL of several rules, by the size of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from edgemoe.engine.engine import Engine
from edgemoe.evaluate.arm import BY_MEMORY, BY_PLACE, EVERY_PLANE, Arm, Miss, Variation
from edgemoe.evaluate.lynx.arms import FOUR_LEVELS, RESIDENT_BITS
from edgemoe.evaluate.lynx.rules import resident, resident_first
from edgemoe.experts.step import Reroute, Study
from edgemoe.policy.levels import LevelPolicy
from edgemoe.policy.settings import RunSettings

CACHES = (0.25, 0.4, 0.6)
"""Fractions of all experts' bytes at 4 bits that the cache has."""

DRAM = 0.3
"""Size of the second tier as a fraction of all experts' bytes, in the study that has one."""

BITS = (*RESIDENT_BITS, 2.75)
"""Mean bits of levels by damage."""

WEAK = (0.5, 1.0)
"""Fractions of a token's mean gate weight below which an absent expert is skipped or replaced."""


def front_arms(study: str, dram: float) -> list[Arm]:
    """Returns every rule at every size of the cache.

    Args:
        study: its name.
        dram: fraction of a second tier; 0: there is none, and levels priced by memory or by place are the same.
    """
    rules = list(_rules(BY_PLACE, *((BY_MEMORY,) if dram else ()), EVERY_PLANE))
    return [
        Arm(settings, ("decode",), study, variation=Variation(name, miss=miss), cache=cache, dram=dram)
        for cache in CACHES
        for name, settings, miss in rules
    ]


def _rules(*prices: str) -> Iterator[tuple[str, RunSettings, Miss]]:
    """Yields the name, the settings and the use of a miss of each rule."""
    four = RunSettings.uniform(4)
    yield "as scheduled", four, Miss()
    yield "as scheduled", RunSettings(levels=(4, 2), critical="ceil"), Miss()
    for price in prices:
        for bits in BITS:
            yield price, RunSettings(levels=FOUR_LEVELS, bits=bits), Miss(price=price)
    for weak in WEAK:
        yield f"drop below {weak:g}", RunSettings(levels=(4, 0), exact=True), Miss(drop=weak)
    for weak in WEAK:
        yield f"instead below {weak:g}", four, Miss(instead=weak)


def changed_by(arm: Arm, engine: Engine) -> AbstractContextManager[None]:
    """Lets the rule of an arm's variation hold inside the block."""
    if arm.variation and arm.variation.alpha:
        return engine.studied(Study(reroute=resident_first(engine, arm.variation.alpha)))
    if arm.variation and arm.variation.miss:
        return engine.studied(miss_study(engine, arm.variation.miss))
    return nullcontext()


def miss_study(engine: Engine, miss: Miss) -> Study:
    """Makes the study whose steps use a miss so; through modules where the compiled kernel has no such rule."""
    if miss.drop:
        return Study(policy=DropAbsent(engine, miss.drop), modules=True)
    if miss.instead:
        return Study(reroute=instead_of_absent(engine, miss.instead), modules=True)
    return Study(policy=None if miss.price == BY_PLACE else _priced(engine, miss.price))


def _priced(engine: Engine, price: str) -> LevelPolicy:
    """The engine's policy, whose price counts less of where planes lie."""
    policy, layers = engine.rules.policy, sorted(engine.store.manifest.layers)
    tiers = replace(policy.tiers, dram=1.0) if policy.tiers and price == BY_MEMORY else None
    return LevelPolicy(policy.settings, layers, policy.experts, policy.damage, tiers, policy.limits)


class DropAbsent(LevelPolicy):
    """Level 4, and 0 for an absent expert whose gate weight is below a fraction of the token's mean.

    Args:
        engine: its settings have both levels.
        fraction: the fraction of the mean.
    """

    def __init__(self, engine: Engine, fraction: float) -> None:
        super().__init__(
            engine.settings, sorted(engine.store.manifest.layers), engine.shape.experts_per_layer
        )
        self._engine, self._fraction = engine, fraction

    def levels(
        self,
        layer: int,
        choice: torch.Tensor,
        gates: torch.Tensor,
        scores: torch.Tensor | None,
        *,
        decode: bool,
    ) -> torch.Tensor:
        """The level of each expert, int64 [T, k]."""
        absent = ~resident(self._engine, layer, self.experts)[choice]
        weak = gates < self._fraction * gates.mean(-1, keepdim=True)
        return torch.where(absent & weak, 0, 4)


def instead_of_absent(engine: Engine, fraction: float) -> Reroute:
    """Makes the rule by which the likeliest free resident experts replace absent ones of little gate weight.

    Args:
        engine: knows which experts are resident.
        fraction: an absent expert below this fraction of the token's mean gate weight is replaced.
    """

    def choose(layer: int, logits: torch.Tensor, top_k: int) -> torch.Tensor:
        there = resident(engine, layer, logits.shape[1])
        order = logits.float().argsort(dim=1, descending=True, stable=True)
        chosen = order[:, :top_k].clone()
        gates = logits.float().gather(1, chosen).softmax(1)
        for token, gate in enumerate(gates):
            free = iter([expert for expert in order[token, top_k:].tolist() if there[expert]])
            for slot in (
                (~there[chosen[token]] & (gate < fraction * gate.mean())).nonzero().flatten().tolist()
            ):
                chosen[token, slot] = next(free, int(chosen[token, slot]))
        return chosen

    return choose
