"""The routed experts of one layer, computed from leases as they become ready.

Registered with transformers' experts interface under the name `edgemoe`: a model's own router, gating and
residual structure stay transformers' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from edgemoe.kernels.cpu import CpuExpertKernel
from prefetch.base import ExpertSource
from storage.base import ExpertKey

NAME = "edgemoe"


@dataclass
class ExpertRunner:
    """What every MoE layer of a model shares.

    Args:
        source: brings experts into memory.
        kernel: computes one.
        level: bits that every expert is asked at.
        exact: compute at exactly `level`, even where more planes are resident (no conservative reuse).
    """

    source: ExpertSource
    kernel: CpuExpertKernel
    level: int
    exact: bool


@dataclass(frozen=True)
class ExpertLayer:
    """Binds an experts module to its layer. Attached to the module as `edgemoe`."""

    layer: int
    runner: ExpertRunner


def experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface.

    Every expert writes rows of its own and the rows are summed in the router's order, so the result does
    not depend on the order in which experts become ready.

    Args:
        module: the model's experts module, whose own weights are never touched.
        hidden: bf16 [T, H].
        top_k_index: int64 [T, k], the experts the router chose.
        top_k_weights: [T, k], their gate weights.

    Returns:
        [T, H] in hidden's dtype.
    """
    binding: ExpertLayer = module.edgemoe
    runner = binding.runner
    tokens, slots = top_k_index.shape
    rows = hidden.new_empty(tokens * slots, hidden.shape[1])
    places = _places(top_k_index)
    wanted = {ExpertKey(binding.layer, expert): runner.level for expert in places}
    with runner.source.stream(wanted) as leases:
        for lease in leases:
            level = runner.level if runner.exact else lease.level
            place = places[lease.key.expert]
            x = hidden if tokens == 1 else hidden[place // slots]
            y = runner.kernel.forward(x, lease.blocks, lease.level, level, module._apply_gate)
            rows[place] = y
    return _weighted_sum(rows.view(tokens, slots, -1), top_k_weights)


def _places(top_k_index: torch.Tensor) -> dict[int, torch.Tensor]:
    """expert -> the flat (token, slot) places routed to it, ascending."""
    if top_k_index.shape[0] == 1:
        slots = torch.arange(top_k_index.shape[1]).unsqueeze(1)
        return dict(zip(top_k_index[0].tolist(), slots, strict=True))
    order = top_k_index.reshape(-1).argsort(stable=True)
    experts, counts = top_k_index.reshape(-1)[order].unique_consecutive(return_counts=True)
    return dict(zip(experts.tolist(), order.split(counts.tolist()), strict=True))


def _weighted_sum(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over slots of weights [T, k] * rows [T, k, H], in float32, slot 0 first."""
    total = rows[:, 0].float() * weights[:, :1].float()
    for slot in range(1, rows.shape[1]):
        total.addcmul_(rows[:, slot].float(), weights[:, slot : slot + 1].float())
    return total.to(rows.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
