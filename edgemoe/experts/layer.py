"""The routed experts of one MoE layer, computed in the order in which they become resident.

Registered with transformers' experts interface under the name `edgemoe`: a model's own router, activation and residual
structure stay transformers' code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from edgemoe.cache.base import Lease
from edgemoe.experts.assignments import Assignment, Assignments, PromptSum, RowSum, joined, without_skipped
from edgemoe.experts.launched import launched
from edgemoe.experts.runtime import ExpertRuntime, NextLogits, OnHost, Predicted
from edgemoe.experts.step import Routed, StepContext, current_step
from edgemoe.kernels.activation import CUSTOM, Activation, between
from edgemoe.kernels.base import BATCH_ROWS, DEVICE_BATCH_ROWS, Part, Rows
from edgemoe.kernels.compensators import ExpertCompensator
from edgemoe.machine.triton import without_triton
from edgemoe.policy.lookahead import predict
from edgemoe.prefetch.base import is_scan
from edgemoe.storage.base import ExpertKey

with without_triton():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "edgemoe"


class ExpertLayer:
    """The experts of one layer. Attached to transformers' experts module as `edgemoe`.

    Args:
        layer: index of the layer in the model.
        runtime: shared by all layers.
        module: the experts module; its weights are never used, its activation and biases are.
        activation: the name under which kernels fuse its activation, or CUSTOM.
        next_router: the next layer that has experts, and logits [T, E] of which the top k are its router's choice on
            a state [T, H]; None: this is the last one.
        next_gates: logits and experts int64 [T, k] -> gate weights [T, k] of that router; None: they are not known.
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
        self.biases = (module.gate_up_proj_bias, module.down_proj_bias) if biased else None
        self.activation = Activation(CUSTOM if biased else activation, between(module))

    @property
    def fuses(self) -> bool:
        """Whether the compiled kernel computes these experts in one call of any rows: silu, and no biases."""
        return self.activation.name == "silu"

    @property
    def looks_ahead(self) -> bool:
        """Whether there is a next layer with experts, and `read_ahead` has an effect now."""
        return self.next_router is not None and self.runtime.source.looks_ahead

    def routed(self, hidden: torch.Tensor, choice: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Computes what a router has chosen, in the current step.

        Args:
            hidden: bf16 [T, H].
            choice: int64 [T, k], experts.
            gates: [T, k], their gate weights.

        Returns:
            bf16 [T, H].
        """
        step = current_step()
        step.kv.check_cancelled()
        policy, host = step.policy, self._on_host(hidden, choice, gates, step)
        choice, gates, ranks = host.choice, host.gates, host.ranks
        step.note_choice(self.layer, choice, gates, host.own)
        levels = joined(
            policy.levels(self.layer, *each, decode=step.decode)
            for each in _of_parts(step, choice, gates, ranks)
        )
        compensated = None
        if policy.settings.compensation:
            compensated = joined(
                policy.compensated(*each, decode=step.decode)
                for each in _of_parts(step, choice, gates, ranks)
            )
        if step.decode and policy.settings.priced:
            step.use.add_damage(policy.damage, [self.layer] * len(choice), choice, gates, levels)
        if 0 in policy.settings.levels:
            gates = without_skipped(gates, levels, renormalise=policy.settings.renormalise)
        assignments = Assignments.of(choice, levels, gates, compensated)
        out = self.forward(step, hidden.contiguous(), assignments, next_logits=host.next_logits)
        if step.study.probe:
            step.study.probe.routed(self.layer, Routed(hidden, choice, gates, ranks), out)
        return out

    def forward(
        self,
        step: StepContext,
        hidden: torch.Tensor,
        assignments: Assignments,
        add_to: torch.Tensor | None = None,
        predicted: Predicted | None = None,
        next_logits: NextLogits | None = None,
    ) -> torch.Tensor:
        """Brings a layer's experts into memory and computes them as they come.

        Every expert writes rows of its own, and a token's rows are summed in the order of their experts, whatever the
        order in which they come. A prompt's rows in RAM take too much memory: they are summed at once (PromptSum),
        and its experts come in the order of their keys. Skipped experts are neither requested nor computed.

        Args:
            step: the step.
            hidden: bf16 [T, H], contiguous.
            assignments: the rows of each expert.
            add_to: bf16, T H in all, contiguous: the result is added to it in place.
            predicted: the next MoE layer's experts and their levels; None: `next_logits` predict them, if it is on.
            next_logits: see OnHost.

        Returns:
            bf16 [T, H], or `add_to`.
        """
        used = [(0, 0, pairs) for pairs in assignments.skipped]
        ordered = not step.decode and hidden.device.type == "cpu"
        rows: RowSum = (PromptSum if ordered else RowSum)(hidden, assignments)
        wanted = assignments.wanted(self.layer)
        scan = step.scans and is_scan(len(wanted), self.runtime.experts)
        compensated = self._compensated(step, assignments) if step.study.compensators else None
        inputs = Rows(hidden)
        with step.experts.request(wanted, scan=scan, ordered=ordered, compensated=compensated) as request:
            self._look_ahead(step, next_logits, assignments.gates.shape[1], predicted, scan=scan)
            for leases in request:
                used += self._compute(step, leases, inputs, assignments, rows)
        step.record.use.add(used)
        return rows.result(add_to)

    def next_logits(self, hidden: torch.Tensor) -> NextLogits | None:
        """The function of this layer's state [T, H] that has the next router's logits; None: this is the last layer."""
        return partial(self.next_router[1], hidden) if self.next_router else None

    def _on_host(
        self, hidden: torch.Tensor, choice: torch.Tensor, gates: torch.Tensor, step: StepContext
    ) -> OnHost:
        """The layer's values that the host needs: they are in RAM already."""
        return OnHost(choice, gates, step.kv.ranks, self.next_logits(hidden), step.take_rerouted())

    def _look_ahead(
        self,
        step: StepContext,
        next_logits: NextLogits | None,
        slots: int,
        predicted: Predicted | None,
        *,
        scan: bool,
    ) -> None:
        """Starts reading the next layer's predicted experts (DyMoE eq. 6-8); in a scan, if they are most of them."""
        source = self.runtime.source
        scan = scan and source.scans_ahead
        if self.next_router is None or not (scan or source.looks_ahead):
            return
        if predicted is None and next_logits:
            predicted = self._predict(step, next_logits(), slots)
        if predicted:
            self.read_ahead(step, *predicted, scan=scan)

    def _predict(self, step: StepContext, logits: torch.Tensor, slots: int) -> Predicted:
        """The next layer's experts by its router's logits, and in decode their levels, where these go by damage."""
        experts = predict(logits, slots, decode=step.decode, remapping=step.remapping)
        if not (step.decode and self._next_gates and step.policy.settings.priced):
            return experts, None
        assert self.next_router
        chosen = torch.tensor(experts)
        gates = self._next_gates(logits, chosen)
        return experts, step.policy.levels(self.next_router[0], chosen, gates, None, decode=True).tolist()

    def read_ahead(
        self,
        step: StepContext,
        experts: Sequence[Sequence[int]],
        by_rule: Sequence[Sequence[int]] | None = None,
        *,
        scan: bool = False,
    ) -> None:
        """Starts reading the next layer's predicted experts, with their levels, within this request (Predicted).

        Args:
            step: the step.
            experts, by_rule: see Predicted.
            scan: the request is part of a scan.
        """
        assert self.next_router
        layer = self.next_router[0]
        levels = step.policy.predicted(layer, experts, by_rule)
        wanted = {ExpertKey(layer, expert): level for expert, level in levels.items()}
        step.experts.read_ahead(wanted, scan=scan and is_scan(len(wanted), self.runtime.experts))

    def _compute(
        self,
        step: StepContext,
        leases: Sequence[Lease],
        inputs: Rows,
        assignments: Assignments,
        rows: RowSum,
    ) -> list[tuple[int, int, int]]:
        """Computes leased experts and adds their rows. Returns what ExpertUse.add takes."""
        used: list[tuple[int, int, int]] = []
        tokens, slots = assignments.gates.shape
        exact = step.policy.settings.exact
        most = DEVICE_BATCH_ROWS if self.runtime.device else BATCH_ROWS
        for batch in assignments.batches(leases, most):
            if not step.decode:
                step.kv.check_cancelled()
            parts, numbers, places = list[Part](), list[int](), list[torch.Tensor]()
            for lease, one in batch:
                level = one.level if exact else lease.level
                compensator = self._compensator(step, lease.key, level, one) if one.compensated else None
                parts.append(Part(lease.blocks, lease.level, level, one.rows, compensator, one.compensated))
                numbers.append(lease.key.expert)
                used.append((one.level, level, one.rows))
                places.append(one.places)
            own = torch.cat(places)
            out = rows.room(own)
            x = inputs if tokens == 1 else replace(inputs, of=own // slots)
            self.apply(x, parts, numbers, out)
            if step.study.probe:
                step.study.probe.computed(self, x, parts, numbers, out)
            rows.add(own, out)
        return used

    def _compensated(self, step: StepContext, assignments: Assignments) -> dict[ExpertKey, int]:
        """The experts computed at the base level, which are compensated (`compensated` of StepExperts.request)."""
        compensators, found = step.study.compensators, dict[ExpertKey, int]()
        assert compensators
        base, exact = compensators.level, step.policy.settings.exact
        for expert, some in assignments.by_expert.items():
            levels = [one.level for one in some if one.compensated]
            key = ExpertKey(self.layer, expert)
            # Unless exact an expert is computed at the level that it is leased at.
            if (base in levels if exact else levels) and compensators.of(key):
                found[key] = 0 if exact else base
        return found

    def _compensator(
        self, step: StepContext, key: ExpertKey, level: int, one: Assignment
    ) -> ExpertCompensator | None:
        """Counts and returns the compensator of an expert that is computed at a level; None: there is none."""
        compensators = step.study.compensators
        compensator = compensators.of(key) if compensators and compensators.level == level else None
        if compensator:
            step.use.add_compensated(compensator.bits, one.compensated)
        return compensator

    def apply(self, x: Rows, parts: Sequence[Part], experts: Sequence[int], out: torch.Tensor) -> None:
        """Computes the parts' rows [R, H], with the biases of a family that has them: [E, N] and [E, H]."""
        kernel, activation = self.runtime.kernel, self.activation
        if self.biases is None:
            kernel.forward(x, parts, activation, out)
            return
        of_row = torch.tensor(experts).repeat_interleave(torch.tensor([part.rows for part in parts]))
        of_row = of_row.to(out.device, non_blocking=True)
        up, down = (bias[of_row] for bias in self.biases)
        kernel.forward(x, parts, Activation(CUSTOM, lambda y: activation.apply(y + up)), out)
        out += down

    def inner(self, expert: int, products: torch.Tensor) -> torch.Tensor:
        """Computes the input [R, I] of an expert's second matrix from its first one's products [R, 2 I or I]."""
        if self.biases is not None:
            products = products + self.biases[0][expert].to(products)
        return self.activation.apply(products)


def _of_parts(
    step: StepContext, choice: torch.Tensor, gates: torch.Tensor, ranks: torch.Tensor | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """The router's choice for each part of a step whose levels are chosen together."""
    for part in step.parts:
        yield choice[part], gates[part], None if ranks is None else ranks[part]


def experts_forward(
    module: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface; see ExpertLayer.routed for arguments and result."""
    layer, given, function = module.edgemoe, (hidden, top_k_index, top_k_weights), launched()
    out: torch.Tensor = function(layer, *given) if function else layer.routed(*given)
    return out


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
