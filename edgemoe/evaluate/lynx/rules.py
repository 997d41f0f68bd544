"""Rules that choose a step's experts in the routers' place (Study.reroute)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgemoe.engine.engine import Engine
from edgemoe.evaluate.arm import Variation
from edgemoe.evaluate.lynx.arms import THIRDS
from edgemoe.experts.step import Reroute
from edgemoe.policy.remapping import prefer_resident


def agreeing(variation: Variation, layers: Sequence[int]) -> Reroute:
    """Makes the rule by which the tokens of every step of several agree, as far as a variation lets them.

    Args:
        variation: says which experts, layers and phases may change.
        layers: numbers of the layers with experts, ascending.
    """
    third, count = variation.third, len(layers)
    free = {layer for i, layer in enumerate(layers) if third is None or THIRDS * i // count == third}

    def choose(layer: int, logits: torch.Tensor, top_k: int) -> torch.Tensor:
        if layer not in free or len(logits) == 1:
            return logits.float().argsort(dim=1, descending=True, stable=True)[:, :top_k]
        return variation.remapping.choose(logits, top_k, variation.only)

    return choose


def resident_first(engine: Engine, alpha: float) -> Reroute:
    """Makes the rule by which a token takes resident experts first, among experts in one bin of 1/alpha of a logit."""

    def choose(layer: int, logits: torch.Tensor, top_k: int) -> torch.Tensor:
        return prefer_resident(logits, top_k, alpha, resident(engine, layer, logits.shape[1]))

    return choose


def resident(engine: Engine, layer: int, experts: int) -> torch.Tensor:
    """Whether each of so many experts of a layer is in memory, bool [experts]."""
    there = torch.zeros(experts, dtype=torch.bool)
    there[[key.expert for key in engine.vram.resident() if key.layer == layer]] = True
    return there
