"""The routed experts of one layer, computed from leases as they become ready.

Registered with transformers' experts interface under the name `edgemoe`: a model's own router, gating and
residual structure stay transformers' code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from cache.base import Lease
from edgemoe.experts.assignments import Share, batches, shares_of, take_skipped
from edgemoe.kernels.base import ExpertKernel, Part
from edgemoe.kernels.native import library as native
from edgemoe.kv.step import StepState
from edgemoe.policy.levels import ExpertUse, LevelPolicy
from prefetch.base import ExpertSource
from prefetch.predictor import predict
from storage.base import ExpertKey
from storage.device import Device

if TYPE_CHECKING:
    from edgemoe.experts.token import TokenExperts

NAME = "edgemoe"


@dataclass
class ExpertRunner:
    """What every MoE layer of a model shares.

    Args:
        source: brings experts into memory.
        kernel: computes one.
        policy: how many bits each expert gets.
        device: that the model is computed on; None: the CPU.
        below: computes on the CPU what the source leaves in DRAM; None: it leaves nothing there in this step.
        state: of the step that is running; the engine sets it before each.
        use: counts what was computed.
        watch: told of a layer and of what its router chose, int64 [T, k], before that is computed; None: nobody is.
    """

    source: ExpertSource
    kernel: ExpertKernel
    policy: LevelPolicy
    device: Device | None = None
    below: ExpertKernel | None = None
    state: StepState = field(default_factory=lambda: StepState(decode=True, signal=None))
    use: ExpertUse = field(default_factory=ExpertUse)
    watch: Callable[[int, torch.Tensor], None] | None = None


@dataclass(frozen=True)
class ExpertLayer:
    """Binds an experts module to its layer. Attached to the module as `edgemoe`.

    Args:
        layer: of the model.
        runner: shared.
        next_layer: the next layer that has experts, and its router's product: [T, H] -> [T, E];
            None: this is the last.
        of_one_token: a quicker way for a single token (token_experts); None: there is none.
    """

    layer: int
    runner: ExpertRunner
    next_layer: tuple[int, Callable[[torch.Tensor], torch.Tensor]] | None
    of_one_token: TokenExperts | None = None


def experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface. While a step is noted, what is run between two pieces of it.

    Args and result: as _experts_forward.
    """
    between = module.edgemoe.runner.state.between
    if between is None:
        return _experts_forward(module, hidden, top_k_index, top_k_weights)
    return between(lambda kv: _experts_forward(module, hidden, top_k_index, top_k_weights))  # type: ignore[no-any-return]


def _experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """A layer's routed experts.

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
    if tokens == 1 and binding.of_one_token:
        return binding.of_one_token(hidden.contiguous(), top_k_index, top_k_weights)
    if runner.watch:
        runner.watch(binding.layer, top_k_index)
    seen = _seen(binding, hidden, top_k_index, top_k_weights)
    levels = policy.levels(binding.layer, seen.chosen, seen.gates, seen.scores, decode=runner.state.decode)
    shares = shares_of(seen.chosen, levels)
    skipped = take_skipped(shares)
    if skipped:
        runner.use.skipped(len(skipped), pairs=sum(share.rows for share in skipped))
        top_k_weights = without_skipped(seen.gates, levels, renormalise=policy.settings.renormalise)
    rows = (hidden.new_zeros if skipped else hidden.new_empty)(tokens * slots, hidden.shape[1])
    # A token's in the router's order: what weighs least is what may be left in DRAM.
    wanted = {
        ExpertKey(binding.layer, expert): max(share.level for share in parts)
        for expert, parts in shares.items()
    }
    passing = not runner.state.decode and len(wanted) > PASSING * policy.experts
    with runner.source.stream(wanted, passing=passing) as leases:
        look_ahead(binding, seen.ahead if runner.device else scored(binding, hidden), slots)
        for lease in leases:
            together = [lease, *leases.ready()]
            near = [one for one in together if runner.device is None or one.device == runner.device.name]
            _compute(module, runner, near, shares, hidden, rows.view(tokens, slots, -1))
            if len(near) < len(together):
                (share,) = shares[lease.key.expert]
                _compute_below(module, runner, lease, share, seen.hidden, rows)
    return _weighted_sum(rows.view(tokens, slots, -1), top_k_weights.to(rows.device, non_blocking=True))


@dataclass(frozen=True)
class _Seen:
    """What the host has to know of a layer to fetch its experts, in RAM.

    Args:
        chosen: int64 [T, k].
        gates: [T, k].
        scores: [T], attention received; None: nobody wants to know.
        ahead: [T, E], what the next layer's router says; None: nobody looks ahead, or it need not come from a device.
        hidden: [T, H]; None: no expert is computed there.
    """

    chosen: torch.Tensor
    gates: torch.Tensor
    scores: torch.Tensor | None
    ahead: torch.Tensor | None
    hidden: torch.Tensor | None


def _seen(
    binding: ExpertLayer, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> _Seen:
    """From a device all of it comes at once: the host waits for the router, and for nothing else in a layer."""
    runner = binding.runner
    scores, device = runner.state.scores, runner.device
    if device is None:
        return _Seen(top_k_index, top_k_weights, scores, None, None)
    optional = {
        "scores": scores,
        "ahead": scored(binding, hidden),
        "hidden": hidden if runner.below else None,
    }
    wanted = {name: tensor for name, tensor in optional.items() if tensor is not None}
    chosen, gates, *others = device.to_host([top_k_index, top_k_weights, *wanted.values()])
    return _Seen(chosen, gates, **(dict.fromkeys(optional) | dict(zip(wanted, others, strict=True))))


def without_skipped(weights: torch.Tensor, levels: torch.Tensor, *, renormalise: bool) -> torch.Tensor:
    """Gate weights [T, k] with 0 for what is at level 0 in levels [T, k], in float32.

    `renormalise` scales what remains of each row to the row's previous sum; a row of which nothing remains
    stays 0.
    """
    left = weights.float().masked_fill(levels == 0, 0)
    if renormalise:
        left = left * (weights.float().sum(1, keepdim=True) / left.sum(1, keepdim=True).clamp_min(1e-20))
    return left


def scored(binding: ExpertLayer, hidden: torch.Tensor) -> torch.Tensor | None:
    """What the next layer's router says of this one's hidden state, [T, E]; None: nobody looks ahead."""
    if binding.next_layer is None or not binding.runner.source.looks_ahead:
        return None
    return binding.next_layer[1](hidden)


def look_ahead(binding: ExpertLayer, scores: torch.Tensor | None, slots: int) -> None:
    """Tells the source what the next layer will probably want (DyMoE eq. 6-8)."""
    runner = binding.runner
    if binding.next_layer is None or scores is None:
        return
    layer = binding.next_layer[0]
    experts = predict(scores, slots, decode=runner.state.decode)
    levels = runner.policy.predicted(layer, experts)
    runner.source.speculate({ExpertKey(layer, expert): level for expert, level in levels.items()})


def _compute(
    module: Any,
    runner: ExpertRunner,
    leases: Sequence[Lease],
    shares: dict[int, list[Share]],
    hidden: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Computes experts into their places of rows [T, k, H]."""
    tokens, slots, _ = rows.shape
    flat = rows.view(tokens * slots, -1)
    for batch in batches(leases, shares, BATCH_ROWS if hidden.device.type == "cpu" else len(flat)):
        parts = []
        for lease, share in batch:
            level = share.level if runner.policy.settings.exact else lease.level
            parts.append(Part(lease.blocks, lease.level, level, share.rows))
            runner.use.scheduled_at(share.level, share.rows)
            runner.use.computed_at(level, scheduled=share.level)
        places = torch.cat([share.places for _, share in batch]).to(hidden.device, non_blocking=True)
        x = hidden.expand(len(places), -1) if tokens == 1 else hidden.index_select(0, places // slots)
        y = _apply(module, runner.kernel, x, parts, [lease.key.expert for lease, _ in batch])
        _in_words(flat).index_copy_(0, places, _in_words(y))


def _compute_below(
    module: Any,
    runner: ExpertRunner,
    lease: Lease,
    share: Share,
    hidden: torch.Tensor | None,
    rows: torch.Tensor,
) -> None:
    """Computes an expert of a single token on the CPU, and has its row brought into its place of rows [k, H].

    At the level asked for, though DRAM may hold more planes: so much is what was weighed against moving it.
    """
    assert runner.below
    assert hidden is not None
    runner.use.scheduled_at(share.level, 1)
    runner.use.computed_at(share.level, scheduled=share.level)
    part = Part(lease.blocks, lease.level, share.level, 1)
    row = runner.below.forward(hidden, [part], module._apply_gate)[0]
    rows[int(share.places)].copy_(row, non_blocking=True)


def _in_words(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes as int64 where rows are of whole ones: torch copies rows to indices number by number."""
    return rows.view(torch.int64) if rows.shape[1] * rows.element_size() % 8 == 0 else rows


PASSING = 0.5
"""Share of a layer's experts beyond which a prompt goes through all layers' in turn: what is read for one layer then
makes room for the next, and what is resident for later ones stays (docs/decisions/0016)."""

BATCH_ROWS = 256
"""Most rows that several experts have in one call of a CPU's kernel: with more, calls cost little beside products."""


def _apply(
    module: Any, kernel: ExpertKernel, x: torch.Tensor, parts: Sequence[Part], experts: Sequence[int]
) -> torch.Tensor:
    """The parts' rows [R, H], with the biases that a family may have: gate_up's [E, 2 I] and down's [E, H]."""
    if not getattr(module, "has_bias", False):
        return kernel.forward(x, parts, module._apply_gate)
    of_row = torch.tensor(experts).repeat_interleave(torch.tensor([part.rows for part in parts]))
    of_row = of_row.to(x.device, non_blocking=True)
    up: torch.Tensor = module.gate_up_proj_bias[of_row]
    down: torch.Tensor = module.down_proj_bias[of_row]
    return kernel.forward(x, parts, lambda y: module._apply_gate(y + up)) + down


def _weighted_sum(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over slots of weights [T, k] * rows [T, k, H], in float32."""
    if rows.device.type == "cpu" and native.available():
        return native.weighted_sum(rows, weights.float().contiguous())
    if rows.shape[0] == 1:
        return (weights.float() @ rows[0].float()).to(rows.dtype)
    total = rows[:, 0].float() * weights[:, :1].float()
    for slot in range(1, rows.shape[1]):
        total.addcmul_(rows[:, slot].float(), weights[:, slot : slot + 1].float())
    return total.to(rows.dtype)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
