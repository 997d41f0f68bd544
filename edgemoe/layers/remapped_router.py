"""Routers of modules choose tokens' experts again (policy/remapping.py), as csrc/remapping.c does in fused decode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from edgemoe.experts.launched import launched
from edgemoe.experts.step import current_step
from edgemoe.families.base import Gate, Traits
from edgemoe.layers.router import CompiledRouter

Choice = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A router's result: logits [T, E], gate weights [T, k], experts int64 [T, k]."""

Choose = Callable[[torch.Tensor, int], torch.Tensor]
"""Logits [T, E] that order experts as the router does, and k -> experts, int64 [T, k], the likeliest first."""

_LEAST_SCORE = 1e-30


def remap_choices(layer: int, router: nn.Module, traits: Traits, config: Any) -> None:
    """Makes a router's choices again in steps whose tokens agree, or that a study reroutes, and keeps its own ones."""
    if traits.gate and traits.gate.remaps:
        normalise = bool(traits.gate.normalise(config))
        router.register_forward_hook(partial(_remapped, layer, traits.gate, normalise))


def _remapped(
    layer: int,
    gate: Gate,
    normalise: bool,
    router: Any,
    inputs: Any,
    choice: Choice,
) -> Choice:
    """Replaces a router's choice (a forward hook), in a step; captured launches have none."""
    if launched():
        return choice
    step = current_step()
    if step.study.reroute:
        choose: Choose = partial(step.study.reroute, layer)
    elif step.remapping:
        choose = step.remapping.choose
    else:
        return choice
    made = remapped(choose, gate, router, choice, normalise=normalise)
    step.rerouted = choice[2]  # counted once the experts' layer has it in RAM
    return made


def remapped(choose: Choose, gate: Gate, router: Any, choice: Choice, *, normalise: bool) -> Choice:
    """The choice made again.

    A new expert's gate weight is the token's first one's times the ratio of their scores, which keeps whatever a router
    multiplies them with; where weights have a fixed sum, they are scaled to it.

    Args:
        choose: makes it.
        gate: the gate of the router's traits.
        router: transformers' module; its bias for the choice and its groups of experts count.
        choice: the router's own.
        normalise: the result of Gate.normalise for the model's config.
    """
    logits, gates, own = choice
    logits, weights = logits.float(), gates.float()
    chosen = choose(_for_choice(router, gate, logits, own), own.shape[1])
    first = weights.max(1, keepdim=True)
    likeliest = own.gather(1, first.indices)
    ratio = _scores(gate, logits).gather(1, chosen) / _scores(gate, logits).gather(1, likeliest)
    made = first.values * ratio
    if normalise:
        made = made * (weights.sum(1, keepdim=True) / made.sum(1, keepdim=True))
    return choice[0], made.to(gates.dtype), chosen


def _scores(gate: Gate, logits: torch.Tensor) -> torch.Tensor:
    """Numbers to which gate weights are proportional: float32 [T, E], above 0."""
    if gate.function == "sigmoid":
        return logits.sigmoid()
    return (logits - logits.max(1, keepdim=True).values).exp()


def _for_choice(router: Any, gate: Gate, logits: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Logits that order experts as the router does, float32 [T, E]; -inf outside the groups of the own experts."""
    bias = getattr(getattr(router, "moe_statics", router), "e_score_correction_bias", None)
    if bias is not None:
        scores = logits.softmax(1) if gate.function == "softmax" else logits.sigmoid()
        if isinstance(router, CompiledRouter) and router.form.rounded_scores:
            scores = scores.bfloat16().float()
        logits = (scores + bias.float().flatten()).clamp_min(_LEAST_SCORE).log()
    groups = getattr(router, "num_group", None) or 1
    if groups > 1:
        size = logits.shape[1] // groups
        theirs = torch.zeros(len(own), groups, dtype=torch.bool, device=own.device)
        theirs.scatter_(1, own // size, True)
        logits = logits.masked_fill(~theirs.repeat_interleave(size, 1), -torch.inf)
    return logits
