"""New tokens through a whole model on a device, one after another, by captured launches.

Where every expert that it needs lies in the device's memory or in the host's, a launch computes a group of layers
(`groups`). Elsewhere there is one launch per layer, and one for its experts:

    layer l      norm ─ q k v ─ rotation ─ attention ─ o ─ norm ─ routers of l and l + 1 ─► report, in host memory
    host         waits for the report, chooses levels, brings the experts, writes their addresses into a table
    experts      table ─ gate_up ─ down ─► rows, which the next layer's first norm adds up

The experts' launch is the same for every layer: what differs is in the table. It is launched once where every expert is
resident, and otherwise for every list of experts that the source hands out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgemoe.cache.base import Lease
from edgemoe.experts.assignments import without_skipped
from edgemoe.experts.runtime import ExpertRuntime
from edgemoe.experts.step import StepContext
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import KVShape
from edgemoe.layers.graph.ahead import OneLaunch
from edgemoe.layers.graph.base import Launches
from edgemoe.layers.graph.choose_launches import choose_launches
from edgemoe.layers.graph.groups import GraphGroups
from edgemoe.layers.graph.memory import TokenMemory
from edgemoe.layers.graph.module_launches import experts_of
from edgemoe.policy.levels import PRICED, LevelPolicy
from edgemoe.storage.base import ExpertKey

Items = tuple[int, NDArray[np.int64]]
"""A resident expert: its level, and TritonExpertKernel.items_at that level, [2, ADDRESSES]."""


class GraphDecode:
    """Runs steps of new tokens through a model whose launches can be captured, on a device.

    The tokens of a step go through the layers one after another, so that each has the bits that it has alone.

    Args:
        model: the model that layers.build made, on the runtime's device.
        runtime: the runtime of its experts.
        kernel: TritonExpertKernel, the runtime's or the kernel that it wraps.
        memory: the memory of the launches.
        launches: the launches of the model.
    """

    def __init__(
        self, model: Any, runtime: ExpertRuntime, kernel: Any, memory: TokenMemory, launches: Launches
    ) -> None:
        assert runtime.device
        self._runtime, self._kernel, self._device = runtime, kernel, runtime.device
        self._memory, self._launches = memory, launches
        self._experts: list[Any] = [experts_of(layer) for layer in model.model.layers]
        self._keys = [[ExpertKey(i, e) for e in range(runtime.experts)] for i in range(len(self._experts))]
        self._hits: list[list[tuple[ExpertKey, int]]] = []
        """(key, level) of the experts of each layer that ran without a request and is not counted yet."""
        self._priced: list[tuple[int, Sequence[int], torch.Tensor, list[int]]] = []
        """(layer, experts, gate weights, levels) of the layers of a token whose levels go by damage."""
        with torch.inference_mode():
            self._begin = self._device.capture(launches.begin, launches)
            self._end = self._device.capture(launches.end, launches)
            self._device.await_computed()
        self._groups = GraphGroups(runtime, kernel, memory, launches)
        self._whole = OneLaunch(self._device, memory, self._groups, launches)
        runtime.source.pinned.launched.add(self._whole.settle)
        self._policy: LevelPolicy | None = None
        """The policy whose rules the device has now; the last step used it."""

    @classmethod
    def try_from(cls, model: Any, runtime: ExpertRuntime, shape: KVShape, slots: int) -> GraphDecode | None:
        """Makes one where Triton's kernels run and the model's launches can be captured; None elsewhere.

        Args:
            model: the model that layers.build made, on the runtime's device.
            runtime: the runtime of its experts.
            shape: the shape of a sequence's KV.
            slots: experts of a token.
        """
        kernel: Any = getattr(runtime.kernel, "wrapped", runtime.kernel)
        if runtime.device is None or not hasattr(kernel, "launch_rows"):
            return None
        made = choose_launches(model, runtime, kernel, shape, slots)
        return cls(model, runtime, kernel, *made) if made else None

    def _configure(self, policy: LevelPolicy) -> None:
        """Gives the device the rules of a step, unless it has them from the step before."""
        if self._policy is policy:
            return
        self._policy = policy
        self._groups.configure(policy)
        slots = self._memory.slots
        self._rules = [policy.decode_rule(layer, slots) for layer in range(len(self._experts))]
        self._highest_ahead = policy.ahead[0]

    most_rows = 32
    """Most sequences of a step. So many took a third of the time of transformers' modules, which compute them together,
    while tests ran on the same machine (docs/benchmarks/2026-11-27-gpu.md)."""

    remaps = False
    """Tokens that are computed one after another cannot agree on experts."""

    compensates = False
    """Captured launches add no products of compensators."""

    turns = False
    """Captured launches take a token's number in its sequence as its position; after pictures both differ."""

    def __call__(self, tokens: Sequence[int], step: StepContext) -> torch.Tensor:
        """Appends a token to each sequence of a step.

        Returns:
            float32 [rows, vocab] in RAM, the logits after each.
        """
        self._configure(step.policy)
        self._groups.active = [set() for _ in self._experts]
        sequences = [sequence for sequence, _, _ in step.kv.spans]
        alone = len(tokens) == 1
        logits = [self._append(step, *row, alone=alone) for row in zip(tokens, sequences, strict=True)]
        step.record.active.update((i, len(self._groups.active[i])) for i in self._launches.moe)
        return logits[0][None] if alone else torch.stack(logits)

    def discard(self) -> None:
        """Waits for a token that ran ahead of its request, and discards it: another step writes keys and values."""
        self._whole.discard()

    def _append(self, step: StepContext, token: int, sequence: SequenceKV, *, alone: bool) -> torch.Tensor:
        """Appends a token to a sequence of a step; returns the logits after it, float32 [vocab] in RAM."""
        logits = self._whole.run(step, sequence, token, alone=alone)
        logits = self._by_groups(step, token, sequence) if logits is None else logits
        self._memory.end_token(sequence)
        return logits

    def _by_groups(self, step: StepContext, token: int, sequence: SequenceKV) -> torch.Tensor:
        """Appends a token by groups of layers, and layer by layer where a group stops."""
        self._memory.begin_token(sequence, token)
        self._begin()
        layer = 0
        while layer < len(self._experts):
            layer = self._groups.run(step, layer)
            if layer < len(self._experts):
                layer = self._run_layers(step, self._groups.of(layer))
        self._end()
        logits, landed = self._device.fetch(self._memory.logits)
        landed.wait()
        return logits

    def _run_layers(self, step: StepContext, layers: range) -> int:
        """Runs layers one by one; returns the one after them."""
        predicted: list[int] | None = None
        try:
            for layer in layers:
                self._launches.reports[layer]()
                if self._experts[layer]:
                    self._device.await_computed()
                    predicted = self._run_experts(step, layer, predicted)
                    self._launches.rests[layer]()
        finally:
            self._count_hits(step)
            self._count_damage(step)
        return layers.stop

    def _run_experts(self, step: StepContext, layer: int, predicted: list[int] | None) -> list[int] | None:
        """Launches a layer's experts as its router has reported.

        Args:
            step: the step.
            layer: index of the layer in the model.
            predicted: experts of this layer that were predicted and resident, for which nothing was read.

        Returns:
            the next layer's predicted experts, where nothing is read for them; None: there is no such prediction.
        """
        memory, pinned = self._memory, self._runtime.source.pinned
        chosen, following, gates = memory.report()
        self._groups.note_choice(step, layer, chosen, gates)
        if predicted is not None:
            step.experts.count_predictions([(layer, step.policy.taken(layer, predicted), chosen)])
        levels = self._levels(step, layer, chosen, gates)
        if 0 in levels:
            renormalise = step.policy.settings.renormalise
            gates = without_skipped(gates, torch.tensor([levels]), renormalise=renormalise)
            step.use.add([(0, 0, 1)] * levels.count(0))
        memory.set_gates(gates)
        keys = self._keys[layer]
        wanted = {keys[e]: level for e, level in zip(chosen, levels, strict=True) if level}
        places = {keys[e]: slot for slot, e in enumerate(chosen)}
        looks_ahead = self._looks_ahead(step, layer)
        if not self._at_hand(layer, wanted) or (looks_ahead and not self._has_ahead(step, layer, following)):
            self._count_hits(step)
            self._request(step, layer, wanted, places, following)
            return None
        self._device.await_copies(pinned.arriving(wanted))
        # Before the launch: an error after it must not leave its kernels without an event.
        self._hits.append(list(wanted.items()))
        self._launch(step, [(key, level, self._resident(key)) for key, level in wanted.items()], places)
        if step.experts.predicting:
            self._count_hits(step)
        return following if looks_ahead else None

    def _request(
        self,
        step: StepContext,
        layer: int,
        levels: dict[ExpertKey, int],
        places: dict[ExpertKey, int],
        following: Sequence[int],
    ) -> None:
        """Brings a layer's experts and launches them as they come, and starts reading the next layer's predicted."""
        experts, launched = self._experts[layer], False
        assert experts
        with step.experts.request(levels) as request:
            if self._looks_ahead(step, layer):
                experts.read_ahead(step, [following])
            for leases in request:
                self._launch(step, [(x.key, levels[x.key], self._items(x)) for x in leases], places)
                launched = True
        if not launched:
            self._launch(step, [], places)

    def _looks_ahead(self, step: StepContext, layer: int) -> bool:
        """Whether the next layer's predicted experts are read ahead. A group's are not: its layers have no requests."""
        experts = self._experts[layer]
        if not (experts and experts.looks_ahead and experts.next_router):
            return False
        following, _ = experts.next_router
        in_group = following not in self._groups.of(layer)
        return not (in_group and self._groups.takes(step, following))

    def _levels(self, step: StepContext, layer: int, choice: Sequence[int], gates: torch.Tensor) -> list[int]:
        """The level of each of a token's experts, in the router's order."""
        rule = self._rules[layer]
        if rule.kind != PRICED:
            return rule.by_place(len(choice))
        levels = step.policy.levels(layer, torch.tensor([choice]), gates, None, decode=True)
        found: list[int] = levels[0].tolist()
        self._priced.append((layer, choice, gates[0].clone(), found))
        return found

    def _count_damage(self, step: StepContext) -> None:
        """Counts what the levels of the token cost, where levels go by damage."""
        if self._priced:
            layers, chosen, gates, levels = zip(*self._priced, strict=True)
            step.use.add_damage(
                step.policy.damage, layers, torch.tensor(chosen), torch.stack(gates), torch.tensor(levels)
            )
            self._priced.clear()

    def _at_hand(self, layer: int, experts: dict[ExpertKey, int]) -> bool:
        """Whether every wanted expert is resident at its level."""
        levels = self._groups.places.levels[0, layer]
        return all(levels[key.expert] >= level for key, level in experts.items())

    def _has_ahead(self, step: StepContext, layer: int, following: Sequence[int]) -> bool:
        """Whether the next layer's predicted experts are resident, as far as they are read ahead."""
        experts = self._experts[layer]
        assert experts
        assert experts.next_router
        after, _ = experts.next_router
        keys, taken = self._keys[after], step.policy.taken(after, following)
        return self._at_hand(after, {keys[expert]: self._highest_ahead for expert in taken})

    def _resident(self, key: ExpertKey) -> Items:
        """The items of a resident expert."""
        places = self._groups.places
        level = int(places.levels[0, key.layer, key.expert])
        return level, places.items(key, level)

    def _items(self, lease: Lease) -> Items:
        """The items of a leased expert."""
        return lease.level, self._kernel.items_at(lease.blocks, lease.level)

    def _launch(
        self,
        step: StepContext,
        experts: Sequence[tuple[ExpertKey, int, Items]],
        places: dict[ExpertKey, int],
    ) -> None:
        """Launches (expert, level wanted, items), whose copies the device waits for, into the rows of their slots."""
        exact, rows, used = step.policy.settings.exact, {}, []
        for key, level, (has, items) in experts:
            if exact and level < has:
                has, items[:, -1] = level, level
            used.append((level, has, 1))
            rows[places[key]] = items
        step.use.add(used)
        self._launches.experts[self._memory.set_experts(rows)]()

    def _count_hits(self, step: StepContext) -> None:
        """Counts the experts of the layers that ran without a request."""
        if self._hits:
            hits, self._hits = self._hits, []
            step.experts.count_hits(hits)
