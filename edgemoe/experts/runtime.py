"""The state that all MoE layers of a model share, and the values that the host needs of one of them in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from edgemoe.kernels.base import ExpertKernel
from edgemoe.machine.device import Device
from edgemoe.prefetch.base import ExpertSource

NextLogits = Callable[[], torch.Tensor]
"""The logits [T, E] of the next MoE layer's router on this layer's state, in RAM."""


@dataclass(frozen=True)
class ExpertRuntime:
    """The state that all MoE layers of a model share, in all steps.

    Args:
        source: brings experts into memory.
        kernel: computes them.
        experts: number of experts in a layer.
        device: the device that the model is computed on; None: the CPU.
    """

    source: ExpertSource
    kernel: ExpertKernel
    experts: int
    device: Device | None = None


@dataclass(frozen=True)
class OnHost:
    """The values of a layer that the host needs, in RAM.

    Args:
        choice: int64 [T, k], the router's experts.
        gates: [T, k], their gate weights.
        ranks: float [T], PromptAttention.ranks; None where the settings do not depend on attention.
        next_logits: computes or has the next router's logits; None: nothing is predicted from this layer.
        own: int64 [T, k], StepContext.rerouted; None: the choice is the router's.
    """

    choice: torch.Tensor
    gates: torch.Tensor
    ranks: torch.Tensor | None
    next_logits: NextLogits | None
    own: torch.Tensor | None


Predicted = tuple[Sequence[Sequence[int]], Sequence[Sequence[int]] | None]
"""Experts of a layer (lookahead.predict), and each one's level by the rule; None: the rule saw no gate weights."""
