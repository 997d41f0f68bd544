"""The routed experts of one layer, computed from leases as they become ready.

Registered with transformers' experts interface under the name `edgemoe`: a model's own router, gating and
residual structure stay transformers' code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from cache.base import Lease
from edgemoe.kernels.base import ExpertKernel, Part
from edgemoe.policy import ExpertUse, LevelPolicy
from edgemoe.step import StepState
from prefetch.base import ExpertSource
from prefetch.lookahead import predict
from storage.base import ExpertKey

NAME = "edgemoe"


@dataclass
class ExpertRunner:
    """What every MoE layer of a model shares.

    Args:
        source: brings experts into memory.
        kernel: computes one.
        policy: how many bits each expert gets.
        state: of the step that is running; the engine sets it before each.
        use: counts what was computed.
    """

    source: ExpertSource
    kernel: ExpertKernel
    policy: LevelPolicy
    state: StepState = field(default_factory=lambda: StepState(decode=True, signal=None))
    use: ExpertUse = field(default_factory=ExpertUse)


@dataclass(frozen=True)
class ExpertLayer:
    """Binds an experts module to its layer. Attached to the module as `edgemoe`.

    Args:
        layer: of the model.
        runner: shared.
        next_layer: the next layer that has experts, and its router's product: [T, H] -> [T, E];
            None: this is the last.
    """

    layer: int
    runner: ExpertRunner
    next_layer: tuple[int, Callable[[torch.Tensor], torch.Tensor]] | None


@dataclass(frozen=True)
class _Share:
    """The (token, slot) pairs of one expert that are scheduled at one level."""

    level: int
    rows: int
    places: torch.Tensor
    """int64 [rows], ascending indices into the flat [T * k]."""


def experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface.

    Every expert writes rows of its own and the rows are summed in the router's order, so the result does
    not depend on the order in which experts become ready. Skipped experts are neither asked for nor computed.

    Args:
        module: the model's experts module, whose own weights are never touched.
        hidden: bf16 [T, H].
        top_k_index: int64 [T, k], the experts the router chose.
        top_k_weights: [T, k], their gate weights.

    Returns:
        [T, H] in hidden's dtype.
    """
    binding: ExpertLayer = module.edgemoe
    runner, policy = binding.runner, binding.runner.policy
    tokens, slots = top_k_index.shape
    state = runner.state
    # What is to be fetched is decided on the host: of all that lies on a device, only this has to come back.
    chosen, gates = top_k_index.cpu(), top_k_weights.cpu()
    scores = None if state.scores is None else state.scores.cpu()
    levels = policy.levels(binding.layer, chosen, gates, scores, decode=state.decode)
    shares = _shares(chosen, levels)
    rows = hidden.new_empty(tokens * slots, hidden.shape[1])
    if skipped := _take_skipped(shares):
        for share in skipped:
            rows[share.places] = 0
            runner.use.scheduled_at(0, share.rows)
            runner.use.computed_at(0, scheduled=0)
        top_k_weights = without_skipped(gates, levels, renormalise=policy.settings.renormalise)
    wanted = {
        ExpertKey(binding.layer, expert): max(share.level for share in parts)
        for expert, parts in shares.items()
    }
    with runner.source.stream(wanted) as leases:
        _look_ahead(binding, hidden, slots)
        for lease in leases:
            together = [lease, *leases.ready()]
            _compute(module, runner, together, shares, hidden, rows.view(tokens, slots, -1))
    return _weighted_sum(rows.view(tokens, slots, -1), top_k_weights.to(rows.device))


def _shares(top_k_index: torch.Tensor, levels: torch.Tensor) -> dict[int, list[_Share]]:
    """expert -> its (token, slot) pairs by level."""
    shares: dict[int, list[_Share]] = {}
    if top_k_index.shape[0] == 1:
        places = torch.arange(top_k_index.shape[1]).unsqueeze(1)
        for expert, level, place in zip(top_k_index[0].tolist(), levels[0].tolist(), places, strict=True):
            shares[expert] = [_Share(level, 1, place)]
        return shares
    joined = (top_k_index * _LEVEL_RANGE + levels).reshape(-1)
    order = joined.argsort(stable=True)
    values, counts = joined[order].unique_consecutive(return_counts=True)
    sizes = counts.tolist()
    for value, rows, group in zip(values.tolist(), sizes, order.split(sizes), strict=True):
        expert, level = divmod(value, _LEVEL_RANGE)
        shares.setdefault(expert, []).append(_Share(level, rows, group))
    return shares


_LEVEL_RANGE = 16
"""Above every level: packs (expert, level) into one number."""


def _take_skipped(shares: dict[int, list[_Share]]) -> list[_Share]:
    """Removes what is at level 0 from `shares`, and returns it."""
    skipped = [share for parts in shares.values() for share in parts if share.level == 0]
    if skipped:
        kept = {expert: [s for s in parts if s.level] for expert, parts in shares.items()}
        shares.clear()
        shares.update((expert, parts) for expert, parts in kept.items() if parts)
    return skipped


def without_skipped(weights: torch.Tensor, levels: torch.Tensor, *, renormalise: bool) -> torch.Tensor:
    """Gate weights [T, k] with 0 for what is at level 0 in levels [T, k], in float32.

    `renormalise` scales what remains of each row to the row's previous sum; a row of which nothing remains
    stays 0.
    """
    left = weights.float().masked_fill(levels == 0, 0)
    if renormalise:
        left = left * (weights.float().sum(1, keepdim=True) / left.sum(1, keepdim=True).clamp_min(1e-20))
    return left


def _look_ahead(binding: ExpertLayer, hidden: torch.Tensor, slots: int) -> None:
    """Tells the source what the next layer will probably want (DyMoE eq. 6-8)."""
    runner = binding.runner
    if binding.next_layer is None or not runner.source.looks_ahead:
        return
    layer, scored = binding.next_layer
    experts = predict(scored(hidden), slots, decode=runner.state.decode)
    levels = runner.policy.predicted(layer, experts)
    runner.source.speculate({ExpertKey(layer, expert): level for expert, level in levels.items()})


def _compute(
    module: Any,
    runner: ExpertRunner,
    leases: Sequence[Lease],
    shares: dict[int, list[_Share]],
    hidden: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Computes experts into their places of rows [T, k, H]."""
    tokens, slots, _ = rows.shape
    flat = rows.view(tokens * slots, -1)
    for batch in _batches(leases, shares, BATCH_ROWS if hidden.device.type == "cpu" else len(flat)):
        parts = []
        for lease, share in batch:
            level = share.level if runner.policy.settings.exact else lease.level
            parts.append(Part(lease.blocks, lease.level, level, share.rows))
            runner.use.scheduled_at(share.level, share.rows)
            runner.use.computed_at(level, scheduled=share.level)
        places = torch.cat([share.places for _, share in batch]).to(hidden.device, non_blocking=True)
        x = hidden.expand(places.shape[0], -1) if tokens == 1 else hidden[places // slots]
        flat[places] = _apply(module, runner.kernel, x, parts, [lease.key.expert for lease, _ in batch])


BATCH_ROWS = 16
"""Most rows that several experts have in one call of a CPU's kernel: with more, calls cost little beside products."""


def _batches(
    leases: Sequence[Lease], shares: dict[int, list[_Share]], most: int
) -> Iterator[list[tuple[Lease, _Share]]]:
    """Every expert's shares, as many together as have `most` rows, or one that has more."""
    batch: list[tuple[Lease, _Share]] = []
    room = most
    for lease in leases:
        for share in shares[lease.key.expert]:
            room -= share.rows
            if batch and room < 0:
                yield batch
                batch, room = [], most - share.rows
            batch.append((lease, share))
    if batch:
        yield batch


def _apply(
    module: Any, kernel: ExpertKernel, x: torch.Tensor, parts: Sequence[Part], experts: Sequence[int]
) -> torch.Tensor:
    """The parts' rows [R, H], with the biases that a family may have: gate_up's [E, 2 I] and down's [E, H]."""
    if not getattr(module, "has_bias", False):
        return kernel.forward(x, parts, module._apply_gate)
    of_row = torch.tensor(experts).repeat_interleave(torch.tensor([part.rows for part in parts]))
    up: torch.Tensor = module.gate_up_proj_bias[of_row]
    down: torch.Tensor = module.down_proj_bias[of_row]
    return kernel.forward(x, parts, lambda y: module._apply_gate(y + up)) + down


def _weighted_sum(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over slots of weights [T, k] * rows [T, k, H], in float32."""
    if rows.shape[0] == 1:
        return (weights.float() @ rows[0].float()).to(rows.dtype)
    total = rows[:, 0].float() * weights[:, :1].float()
    for slot in range(1, rows.shape[1]):
        total.addcmul_(rows[:, slot].float(), weights[:, slot : slot + 1].float())
    return total.to(rows.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
