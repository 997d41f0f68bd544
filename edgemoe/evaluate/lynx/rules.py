"""Rules that choose a step's experts in the routers' place (Study.reroute)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgemoe.engine.engine import Engine
from edgemoe.evaluate.arm import Variation
from edgemoe.evaluate.lynx.arms import QUARTERS, parts_of
from edgemoe.experts.step import Reroute
from edgemoe.policy.remapping import prefer_resident


def agreeing(variation: Variation, layers: Sequence[int]) -> Reroute:
    """Makes the rule by which the tokens of every step of several agree, as far as a variation lets them.

    Args:
        variation: says which tokens, experts, layers and phases may change.
        layers: numbers of the layers with experts, ascending.
    """
    part, parts = variation.part, parts_of(len(layers))
    free = {layer for layer, its in zip(layers, parts, strict=True) if part is None or its == part}

    def choose(layer: int, logits: torch.Tensor, top_k: int) -> torch.Tensor:
        own = logits.float().argsort(dim=1, descending=True, stable=True)[:, :top_k]
        if layer not in free or len(logits) == 1:
            return own
        agreed = variation.remapping.choose(logits, top_k, variation.only)
        if variation.quarter is None:
            return agreed
        return torch.where((quarters(logits) == variation.quarter).unsqueeze(1), agreed, own)

    return choose


def quarters(logits: torch.Tensor) -> torch.Tensor:
    """The quarter of each of a step's tokens, by the variance of its router's probabilities: 0 the least sure.

    Args:
        logits: [T, E], any float dtype.

    Returns:
        int64 [T], 0 to 3; of equals the earlier token is the less sure.
    """
    order = logits.float().softmax(1).var(1).argsort(stable=True)
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)) * QUARTERS // len(order))


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
