"""The routed experts of one MoE layer, computed in the order in which they become resident.

Registered with transformers' experts interface under the name `edgemoe`: a model's own router, activation and residual
structure stay transformers' code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from edgemoe.cache.base import Lease
from edgemoe.experts.assignments import Assignments
from edgemoe.experts.row_sum import PromptSum, RowSum
from edgemoe.experts.use import ChoiceCounts, ExpertUse
from edgemoe.kernels.activation import CUSTOM, Activation
from edgemoe.kernels.base import BATCH_ROWS, ExpertKernel, Part, Rows
from edgemoe.kernels.compensators import Compensators, ExpertCompensator
from edgemoe.kv.step import StepKV
from edgemoe.machine.device import Device
from edgemoe.machine.triton import without_triton
from edgemoe.policy.levels import LevelPolicy, without_skipped
from edgemoe.policy.lookahead import predict
from edgemoe.policy.remapping import Remapping
from edgemoe.prefetch.base import ExpertSource, is_scan
from edgemoe.storage.base import ExpertKey

with without_triton():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "edgemoe"

Reroute = Callable[[int, torch.Tensor, int], torch.Tensor]
"""Layer, logits [T, E] that order experts as its router does, and k -> experts, int64 [T, k], the likeliest first."""


@dataclass(frozen=True)
class Routed:
    """What a layer's router has chosen for the rows of a step.

    Args:
        hidden: bf16 [T, H], its input, where the model is.
        chosen: int64 [T, k], experts.
        gates: [T, k], their gate weights, 0 where an expert is skipped.
        ranks: float [T] of PromptAttention.ranks; None where the settings do not depend on attention.
    """

    hidden: torch.Tensor
    chosen: torch.Tensor
    gates: torch.Tensor
    ranks: torch.Tensor | None


class ExpertProbe(Protocol):
    """Measures experts in steps of several rows."""

    def computed(
        self,
        layer: ExpertLayer,
        x: Rows,
        parts: Sequence[Part],
        experts: Sequence[int],
        out: torch.Tensor,
    ) -> None:
        """Takes the rows of some experts: inputs, and outputs [R, H] before their gate weights."""

    def routed(self, layer: int, routed: Routed, out: torch.Tensor) -> None:
        """Takes what a layer's router has chosen, and the sum [T, H] of its experts, which it may change."""


@dataclass
class ExpertRuntime:
    """What all MoE layers of a model share.

    Args:
        source: brings experts into memory.
        kernel: computes them.
        policy: chooses their levels.
        device: that the model is computed on; None: the CPU.
        use: counts the experts that were computed.
        watch: called with every layer and its router's choice, int64 [T, k]; None: no caller wants it.
        probe: measures experts; None: nothing is measured.
        choices: counts what routers choose; None: nothing is counted.
        compensators: of the experts; None: none are used.
        reroute: chooses the experts of every step in the routers' place, for a study; None: they choose.
        step: the state of the step that runs; set by the model runner.
    """

    source: ExpertSource
    kernel: ExpertKernel
    policy: LevelPolicy
    device: Device | None = None
    use: ExpertUse = field(default_factory=ExpertUse)
    watch: Callable[[int, torch.Tensor], None] | None = None
    probe: ExpertProbe | None = None
    choices: ChoiceCounts | None = None
    compensators: Compensators | None = None
    reroute: Reroute | None = None
    step: StepKV = field(init=False)

    @property
    def remapping(self) -> Remapping | None:
        """How the tokens of the step agree on experts; None: it has one token, or a prompt's, or each token chooses."""
        return self.policy.settings.remapping if self.step.decode and len(self.step.spans) > 1 else None


Predicted = tuple[Sequence[Sequence[int]], Sequence[Sequence[int]] | None]
"""Experts of a layer, as of lookahead.predict, and each one's level by the rule; None: it saw no gate weights."""


class ExpertLayer:
    """The experts of one layer. Attached to transformers' experts module as `edgemoe`.

    Args:
        layer: of the model.
        runtime: shared by all layers.
        module: the experts module; its weights are never used, its activation and biases are.
        activation: the name under which kernels fuse its activation, or CUSTOM.
        next_router: the next layer that has experts, and logits [T, E] of which the top k are its router's choice on
            a state [T, H]; None: this is the last one.
        next_gates: those logits and experts int64 [T, k] -> their gate weights [T, k]; None: it cannot be said.
    """

    def __init__(
        self,
        layer: int,
        runtime: ExpertRuntime,
        module: Any,
        activation: str,
        next_router: tuple[int, Callable[[torch.Tensor], torch.Tensor]] | None,
        next_gates: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.layer, self.runtime, self.next_router, self._next_gates = layer, runtime, next_router, next_gates
        biased = getattr(module, "has_bias", False)
        self._biases = (module.gate_up_proj_bias, module.down_proj_bias) if biased else None
        self.activation = Activation(CUSTOM if biased else activation, module._apply_gate)

    @property
    def fuses(self) -> bool:
        """Whether the compiled kernel computes these experts in one call: silu, and no biases."""
        return self.activation.name == "silu"

    @property
    def looks_ahead(self) -> bool:
        """Whether there is a next layer with experts, and `read_ahead` has an effect now."""
        return self.next_router is not None and self.runtime.source.looks_ahead

    def routed(self, hidden: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Computes what a router has chosen.

        Args:
            hidden: bf16 [T, H].
            chosen: int64 [T, k], experts.
            gates: [T, k], their gate weights.

        Returns:
            bf16 [T, H].
        """
        runtime, policy, step = self.runtime, self.runtime.policy, self.runtime.step
        step.check_cancelled()
        if step.between:
            step.between(self.layer)
            runtime.step = step  # a step that ran in between has ended
        if runtime.watch:
            runtime.watch(self.layer, chosen)
        chosen, gates, ranks = self._on_host(hidden, chosen, gates, step)
        if runtime.choices:
            runtime.choices.add(self.layer, chosen, gates)
        levels = policy.levels(self.layer, chosen, gates, ranks, decode=step.decode)
        compensated = policy.compensated(chosen, gates, ranks, decode=step.decode)
        if step.decode and policy.settings.priced:
            runtime.use.damage += policy.damage_of([self.layer] * len(chosen), chosen, gates, levels)
        if 0 in policy.settings.levels:
            gates = without_skipped(gates, levels, renormalise=policy.settings.renormalise)
        out = self.forward(hidden.contiguous(), Assignments.of(chosen, levels, gates, compensated))
        if runtime.probe:
            runtime.probe.routed(self.layer, Routed(hidden, chosen, gates, ranks), out)
        return out

    def forward(
        self,
        hidden: torch.Tensor,
        assignments: Assignments,
        add_to: torch.Tensor | None = None,
        predicted: Predicted | None = None,
    ) -> torch.Tensor:
        """Brings a layer's experts into memory and computes them as they come.

        Every expert writes rows of its own, and a token's rows are summed in the router's order, so the result does not
        depend on the order in which experts come. A prompt's rows in RAM would take too much memory: they are summed at
        once (PromptSum), and its experts come in a fixed order. Skipped experts are neither requested nor computed.

        Args:
            hidden: bf16 [T, H], contiguous.
            assignments: the rows of each expert.
            add_to: bf16, T H in all, contiguous: the result is added to it in place.
            predicted: the next MoE layer's experts and their levels; None: predicted here if it is on.

        Returns:
            bf16 [T, H], or `add_to`.
        """
        runtime = self.runtime
        if assignments.skipped:
            runtime.use.add([(0, 0, pairs) for pairs in assignments.skipped])
        ordered = not runtime.step.decode and hidden.device.type == "cpu"
        rows: RowSum = (PromptSum if ordered else RowSum)(hidden, assignments)
        wanted = assignments.wanted(self.layer)
        several = not runtime.step.decode or len(hidden) > 1
        scans = several and runtime.policy.settings.scan == "on"
        scan = scans and is_scan(len(wanted), runtime.policy.experts)
        compensated = self._compensated(assignments) if runtime.compensators else None
        inputs = Rows(hidden)
        with runtime.source.request(wanted, scan=scan, ordered=ordered, compensated=compensated) as request:
            self._look_ahead(hidden, assignments.gates.shape[1], predicted, scan=scan)
            for leases in request:
                self._compute(leases, inputs, assignments, rows)
        return rows.result(add_to)

    def _on_host(
        self, hidden: torch.Tensor, chosen: torch.Tensor, gates: torch.Tensor, step: StepKV
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The router's choice, its gate weights, and the rows' ranks by attention received, in RAM."""
        return chosen, gates, step.ranks

    def _look_ahead(
        self, hidden: torch.Tensor, slots: int, predicted: Predicted | None, *, scan: bool = False
    ) -> None:
        """Starts reading the next layer's predicted experts (DyMoE eq. 6-8); in a scan, if they are most of them."""
        scan = scan and self.next_router is not None and self.runtime.source.scans_ahead
        if not (self.looks_ahead or scan):
            return
        self.read_ahead(*(predicted or self._predict(hidden, slots)), scan=scan)

    def _predict(self, hidden: torch.Tensor, slots: int) -> Predicted:
        """The next layer's experts on this layer's state, and in decode their levels, where these go by damage."""
        runtime, logits = self.runtime, self._next_logits(hidden)
        decode = runtime.step.decode
        experts = predict(logits, slots, decode=decode, remapping=runtime.remapping)
        if not (decode and self._next_gates and runtime.policy.settings.priced):
            return experts, None
        assert self.next_router
        chosen = torch.tensor(experts)
        gates = self._next_gates(logits, chosen)
        return experts, runtime.policy.levels(self.next_router[0], chosen, gates, None, decode=True).tolist()

    def read_ahead(
        self,
        experts: Sequence[Sequence[int]],
        by_rule: Sequence[Sequence[int]] | None = None,
        *,
        scan: bool = False,
    ) -> None:
        """Starts reading the next layer's predicted experts, with their levels, within this request (Predicted).

        Args:
            experts, by_rule: Predicted.
            scan: the request is part of a scan.
        """
        assert self.next_router
        layer, policy = self.next_router[0], self.runtime.policy
        levels = policy.predicted(layer, experts, by_rule)
        wanted = {ExpertKey(layer, expert): level for expert, level in levels.items()}
        self.runtime.source.read_ahead(wanted, scan=scan and is_scan(len(wanted), policy.experts))

    def _next_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The next router's logits [T, E] on this layer's state, in RAM."""
        assert self.next_router
        return self.next_router[1](hidden)

    def _compute(
        self,
        leases: Sequence[Lease],
        inputs: Rows,
        assignments: Assignments,
        rows: RowSum,
    ) -> None:
        """Computes leased experts and adds their rows."""
        tokens, slots = assignments.gates.shape
        exact = self.runtime.policy.settings.exact
        most = BATCH_ROWS if inputs.x.device.type == "cpu" else assignments.rows
        for batch in assignments.batches(leases, most):
            self.runtime.step.check_cancelled()
            parts, numbers, used, taken = (
                list[Part](),
                list[int](),
                list[tuple[int, int, int]](),
                list[torch.Tensor](),
            )
            for lease, one in batch:
                level = one.level if exact else lease.level
                compensator = self._compensator(lease.key, level) if one.compensated else None
                if compensator:
                    self.runtime.use.add_compensated(compensator.bits, one.compensated)
                parts.append(Part(lease.blocks, lease.level, level, one.rows, compensator, one.compensated))
                numbers.append(lease.key.expert)
                used.append((one.level, level, one.rows))
                taken.append(one.places)
            self.runtime.use.add(used)
            own = torch.cat(taken)
            out = rows.room(own)
            x = inputs if tokens == 1 else replace(inputs, of=own // slots)
            self.apply(x, parts, numbers, out)
            if self.runtime.probe:
                self.runtime.probe.computed(self, x, parts, numbers, out)
            rows.add(own, out)

    def _compensated(self, assignments: Assignments) -> dict[ExpertKey, int]:
        """Experts that are to be compensated, as of ExpertSource.request: where they are computed at the base level."""
        runtime, found = self.runtime, dict[ExpertKey, int]()
        assert runtime.compensators
        base, exact = runtime.compensators.level, runtime.policy.settings.exact
        for expert, some in assignments.by_expert.items():
            levels = [one.level for one in some if one.compensated]
            key = ExpertKey(self.layer, expert)
            # Unless exact an expert is computed at the level that it is leased at.
            if (base in levels if exact else levels) and runtime.compensators.of(key):
                found[key] = 0 if exact else base
        return found

    def _compensator(self, key: ExpertKey, level: int) -> ExpertCompensator | None:
        """The compensator of an expert that is computed at a level; None where the level or the expert has none."""
        compensators = self.runtime.compensators
        return compensators.of(key) if compensators and compensators.level == level else None

    def apply(self, x: Rows, parts: Sequence[Part], experts: Sequence[int], out: torch.Tensor) -> None:
        """Computes the parts' rows [R, H], with the biases of a family that has them: [E, 2 I] and [E, H]."""
        kernel, activation = self.runtime.kernel, self.activation
        if self._biases is None:
            kernel.forward(x, parts, activation, out)
            return
        of_row = torch.tensor(experts).repeat_interleave(torch.tensor([part.rows for part in parts]))
        of_row = of_row.to(out.device, non_blocking=True)
        up, down = (bias[of_row] for bias in self._biases)
        kernel.forward(x, parts, Activation(CUSTOM, lambda y: activation.apply(y + up)), out)
        out += down


def experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface; see ExpertLayer.routed for arguments and result."""
    layer: ExpertLayer = module.edgemoe
    return layer.routed(hidden, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
