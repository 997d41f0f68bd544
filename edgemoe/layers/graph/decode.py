"""One new token through a whole model on a device, by captured launches.

Where every expert that it needs lies in the device's memory or in the host's, a launch computes a group of layers
(`groups`). Elsewhere there is a launch a layer, and one for its experts:

    layer l      norm ─ q k v ─ rotation ─ attention ─ o ─ norm ─ routers of l and l + 1 ─► report, in host memory
    host         waits for the report, chooses levels, brings the experts, writes their addresses into a table
    experts      table ─ gate_up ─ down ─► rows, which the next layer's first norm adds up

The experts' launch is the same for every layer: what differs is in the table. It is launched once where every expert is
resident, and otherwise for every list of experts that the source hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgemoe.cache.base import Lease
from edgemoe.experts.device_layer import DeviceExpertLayer
from edgemoe.experts.layer import ExpertRuntime
from edgemoe.families.base import FusedGQA
from edgemoe.families.table import known_family
from edgemoe.kernels.activation import CUSTOM
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import StepKV
from edgemoe.layers.dense import DenseEmbedding, DenseLinear, is_rms_norm
from edgemoe.layers.graph.groups import GraphGroups
from edgemoe.layers.graph.memory import GraphMemory
from edgemoe.policy.levels import RANKED, UNIFORM, LevelPolicy, without_skipped
from edgemoe.storage.base import ExpertKey

Items = tuple[int, NDArray[np.int64]]
"""A resident expert: its level, and TritonExpertKernel.items_at that level, [2, ADDRESSES]."""


class GraphDecode:
    """Runs steps of one token through a model whose layers are all of a family with fused_gqa, on a device.

    Args:
        model: of layers.build, on the runtime's device.
        traits: of its family.
        runtime: of its experts.
        kernel: TritonExpertKernel, the runtime's or the kernel that it wraps.
    """

    def __init__(self, model: Any, traits: FusedGQA, runtime: ExpertRuntime, kernel: Any) -> None:
        assert runtime.device
        self._runtime, self._kernel, self._device = runtime, kernel, runtime.device
        self._layers, self._config = list(model.model.layers), model.config
        self._embed, self._rotary = model.model.embed_tokens, model.model.rotary_emb
        self._experts: list[DeviceExpertLayer] = [layer.mlp.experts.edgemoe for layer in self._layers]
        gate = known_family(model.config.model_type).gate
        assert gate
        self._gate = gate
        count, slots = runtime.policy.experts, self._layers[0].mlp.gate.top_k
        self._keys = [[ExpertKey(i, expert) for expert in range(count)] for i in range(len(self._layers))]
        self._hits: list[list[tuple[ExpertKey, int]]] = []
        """(key, level) of the experts of each layer that ran without a request and is not counted yet."""
        self._priced: list[tuple[int, Sequence[int], torch.Tensor, list[int]]] = []
        """(layer, experts, gate weights, levels) of the layers of a token whose levels go by damage."""
        self._memory = GraphMemory(self._device, model, kernel.inner, count, slots)
        self._capture(model, traits.windows(model.config))
        self.configure(runtime.policy)

    @classmethod
    def try_from(cls, model: Any, traits: FusedGQA | None, runtime: ExpertRuntime) -> GraphDecode | None:
        """Makes one where Triton's kernels run and every part of the model has its kernel; None elsewhere."""
        kernel: Any = getattr(runtime.kernel, "wrapped", runtime.kernel)
        if runtime.device is None or not hasattr(kernel, "launch_rows"):
            return None
        if traits is None or not traits.block_is_experts or getattr(model.config, "clip_qkv", None):
            return None
        outer = model.model.embed_tokens, model.lm_head
        if tuple(map(type, outer)) != (DenseEmbedding, DenseLinear) or not is_rms_norm(model.model.norm):
            return None
        return cls(model, traits, runtime, kernel) if all(map(_fits, model.model.layers)) else None

    def configure(self, policy: LevelPolicy) -> None:
        """Sets the rules of levels for the steps that follow."""
        self._groups.configure(policy)
        slots = self._memory.slots
        self._rules = [policy.decode_rule(layer, slots) for layer in range(len(self._layers))]
        self._highest_ahead = policy.ahead[0]

    most_rows = 1
    """Most sequences of a step."""

    def __call__(self, tokens: Sequence[int], kv: StepKV) -> torch.Tensor:
        """Appends a token to the one sequence of a step.

        Returns:
            float32 [1, vocab] on the device, the logits after it.
        """
        self._enter(tokens[0], kv.spans[0][0])
        layer = 0
        while layer < len(self._layers):
            layer = self._groups.run(layer)
            if layer < len(self._layers):
                layer = self._run_layers(self._groups.of(layer))
        self._segments[-1]()
        return self._memory.logits.float().unsqueeze(0)

    def _run_layers(self, layers: range) -> int:
        """Runs layers one by one; returns the one behind them."""
        predicted: list[int] | None = None
        try:
            for layer in layers:
                self._segments[layer]()
                self._device.await_computed()
                predicted = self._run_experts(layer, predicted)
        finally:
            self._count_hits()
            self._count_damage()
        return layers.stop

    def _enter(self, token: int, sequence: SequenceKV) -> None:
        """Sets the state of a token, its embedding and its rotation."""
        memory = self._memory
        memory.set_state(sequence.length, sequence.keys, sequence.values, token)
        memory.hidden.copy_(self._embed(memory.token)[0])
        cosine, sine = self._rotary(memory.hidden[None, None], memory.position[None])
        memory.cosine.copy_(cosine.flatten())
        memory.sine.copy_(sine.flatten())

    def _run_experts(self, layer: int, predicted: list[int] | None) -> list[int] | None:
        """Launches a layer's experts as its router has reported.

        Args:
            layer: of the model.
            predicted: experts of this layer that were predicted and resident, for which nothing was read.

        Returns:
            the next layer's predicted experts, where nothing is read for them; None: there is no such prediction.
        """
        runtime, memory = self._runtime, self._memory
        chosen, following, gates = memory.report()
        pinned = runtime.source.pinned
        if runtime.watch:
            runtime.watch(layer, torch.tensor([chosen]))
        if predicted is not None:
            pinned.count_predictions([(layer, runtime.policy.taken(layer, predicted), chosen)])
        levels = self._levels(layer, chosen, gates)
        if 0 in levels:
            renormalise = runtime.policy.settings.renormalise
            gates = without_skipped(gates, torch.tensor([levels]), renormalise=renormalise)
            runtime.use.add([(0, 0, 1)] * levels.count(0))
        memory.set_gates(gates)
        keys = self._keys[layer]
        wanted = {keys[e]: level for e, level in zip(chosen, levels, strict=True) if level}
        places = {keys[e]: slot for slot, e in enumerate(chosen)}
        looks_ahead = self._looks_ahead(layer)
        if not self._at_hand(layer, wanted) or (looks_ahead and not self._has_ahead(layer, following)):
            self._count_hits()
            self._request(layer, wanted, places, following)
            return None
        self._device.await_copies(pinned.arriving(wanted))
        # Before the launch: an error behind it must not leave its kernels without an event.
        self._hits.append(list(wanted.items()))
        self._launch([(key, level, self._resident(key)) for key, level in wanted.items()], places)
        if runtime.source.predicting:
            self._count_hits()
        return following if looks_ahead else None

    def _request(
        self, layer: int, wanted: dict[ExpertKey, int], places: dict[ExpertKey, int], following: Sequence[int]
    ) -> None:
        """Brings a layer's experts and launches them as they come, and starts reading the next layer's predicted."""
        experts, launched = self._experts[layer], False
        with self._runtime.source.request(wanted) as request:
            if self._looks_ahead(layer):
                experts.read_ahead([following])
            for leases in request:
                self._launch([(x.key, wanted[x.key], self._items(x)) for x in leases], places)
                launched = True
        if not launched:
            self._launch([], places)

    def _looks_ahead(self, layer: int) -> bool:
        """Whether the next layer's predicted experts are read ahead: not those of a group, which has no requests."""
        behind = layer + 1
        in_group = behind < len(self._layers) and behind not in self._groups.of(layer)
        return self._experts[layer].looks_ahead and not (in_group and self._groups.takes(behind))

    def _levels(self, layer: int, chosen: Sequence[int], gates: torch.Tensor) -> list[int]:
        """The level of each of a token's experts, in the router's order."""
        rule = self._rules[layer]
        if rule.kind == UNIFORM:
            return [rule.levels[0]] * len(chosen)
        if rule.kind == RANKED:
            high, low = rule.levels
            return [high] * rule.critical + [low] * (len(chosen) - rule.critical)
        levels = self._runtime.policy.levels(layer, torch.tensor([chosen]), gates, None, decode=True)
        found: list[int] = levels[0].tolist()
        self._priced.append((layer, chosen, gates[0].clone(), found))
        return found

    def _count_damage(self) -> None:
        """Counts what the levels of the token cost, where levels go by damage."""
        if self._priced:
            layers, chosen, gates, levels = zip(*self._priced, strict=True)
            self._runtime.use.damage += self._runtime.policy.damage_of(
                layers, torch.tensor(chosen), torch.stack(gates), torch.tensor(levels)
            )
            self._priced.clear()

    def _at_hand(self, layer: int, wanted: dict[ExpertKey, int]) -> bool:
        """Whether every wanted expert is resident at its level."""
        levels = self._groups.places.levels[0, layer]
        return all(levels[key.expert] >= level for key, level in wanted.items())

    def _has_ahead(self, layer: int, following: Sequence[int]) -> bool:
        """Whether the next layer's predicted experts are resident, as far as they are read ahead."""
        router = self._experts[layer].next_router
        assert router
        after, _ = router
        keys, taken = self._keys[after], self._runtime.policy.taken(after, following)
        return self._at_hand(after, {keys[expert]: self._highest_ahead for expert in taken})

    def _resident(self, key: ExpertKey) -> Items:
        """The items of a resident expert."""
        places = self._groups.places
        level = int(places.levels[0, key.layer, key.expert])
        return level, places.items(key, level)

    def _items(self, lease: Lease) -> Items:
        """The items of a leased expert."""
        return lease.level, np.array(self._kernel.items_at(lease.blocks, lease.level))

    def _launch(self, experts: Sequence[tuple[ExpertKey, int, Items]], places: dict[ExpertKey, int]) -> None:
        """Launches (expert, level wanted, items), whose copies the device waits for, into the rows of their slots."""
        exact, rows, used = self._runtime.policy.settings.exact, {}, []
        for key, level, (has, items) in experts:
            if exact and level < has:
                has, items[:, -1] = level, level
            used.append((level, has, 1))
            rows[places[key]] = items
        self._runtime.use.add(used)
        self._computes[self._memory.set_experts(rows)]()

    def _count_hits(self) -> None:
        """Counts the experts of the layers that ran without a request."""
        if self._hits:
            hits, self._hits = self._hits, []
            self._runtime.source.pinned.count_hits(hits)

    def _capture(self, model: Any, windows: Sequence[int]) -> None:
        """Captures every launch, with a KV of one token that goes afterwards."""
        memory, capture = self._memory, self._device.capture
        attention = self._layers[0].self_attn
        shape = len(self._layers), attention.k_proj.out_features // attention.head_dim, 1, attention.head_dim
        keys, values = (memory.hidden.new_zeros(shape) for _ in range(2))
        memory.set_state(0, keys, values, 0)
        with torch.inference_mode():
            launches = [self._layer(index, window) for index, window in enumerate(windows)]
            self._segments = [capture(partial(self._report, launch)) for launch in launches]
            self._segments.append(capture(self._end(model)))
            self._computes = [capture(partial(self._launch_table, table)) for table in range(memory.slots)]
            self._device.await_computed()
        self._groups = GraphGroups(self._runtime, self._kernel, memory, launches, self._launch_experts)

    def _report(self, launch: Callable[[], None]) -> None:
        """Launches a layer, and the copy of its router's report to the host."""
        launch()
        self._memory.reported.copy_(self._memory.reporting, non_blocking=True)

    def _layer(self, index: int, window: int) -> Callable[[], None]:
        """Launches a layer, from the sum of the experts before it to its router's report on the device."""
        from edgemoe.kernels.triton.attention import RowAttention
        from edgemoe.kernels.triton.dense import add_and_normalise, multiply
        from edgemoe.kernels.triton.router import choose_experts

        memory, layer = self._memory, self._layers[index]
        module, before, after = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
        dim = module.head_dim
        heads, kv_heads = module.q_proj.out_features // dim, module.k_proj.out_features // dim
        norms = (_norm(module.q_norm), _norm(module.k_norm)) if hasattr(module, "q_norm") else None
        attention = RowAttention(heads, kv_heads, dim, norms, module.scaling, window, index)
        projections = [_matrix(getattr(module, f"{name}_proj")) for name in "qkv"]
        out = [_matrix(module.o_proj)]
        # The last layer's prediction, by its own router, is not used.
        following = self._layers[min(index + 1, len(self._layers) - 1)]
        routers = [_matrix(each.mlp.gate) for each in (layer, following)]
        rows, gates = (memory.rows, memory.gates) if index else (None, None)
        normalise, rounded = bool(self._gate.normalise(self._config)), self._gate.rounded

        def launch() -> None:
            add_and_normalise(rows, gates, memory.hidden, *_norm(before), memory.normed)
            multiply(memory.normed, projections, memory.qkv)
            rotation = memory.cosine, memory.sine
            attention.launch(
                memory.qkv, rotation, memory.state, memory.queries, memory.scratch, memory.attended
            )
            multiply(memory.attended, out, memory.projected)
            add_and_normalise(memory.projected, memory.one, memory.hidden, *_norm(after), memory.normed)
            multiply(memory.normed, routers, memory.router_logits)
            choose_experts(
                *(memory.router_logits, memory.reporting, memory.slots),
                normalise=normalise,
                rounded=rounded,
            )

        return launch

    def _end(self, model: Any) -> Callable[[], None]:
        """Launches the sum of the last experts, the norm and the head."""
        from edgemoe.kernels.triton.dense import add_and_normalise, multiply

        memory, norm, head = self._memory, _norm(model.model.norm), [_matrix(model.lm_head)]

        def launch() -> None:
            add_and_normalise(memory.rows, memory.gates, memory.hidden, *norm, memory.normed)
            multiply(memory.normed, head, memory.logits)

        return launch

    def _launch_table(self, table: int) -> None:
        """Launches the experts of a table."""
        self._memory.send_table(table)
        self._launch_experts()

    def _launch_experts(self) -> None:
        """Launches the experts of the memory's items."""
        memory, activation = self._memory, self._experts[0].activation
        self._kernel.launch_rows(memory.items, memory.normed, activation, memory.inner, memory.rows)


def _fits(layer: Any) -> bool:
    """Whether attention, norms, router and experts of a layer have kernels."""
    attention, gate = layer.self_attn, getattr(layer.mlp, "gate", None)
    experts = getattr(getattr(layer.mlp, "experts", None), "edgemoe", None)
    if experts is None or experts.activation.name == CUSTOM or attention.head_dim % 2:
        return False
    norms = [getattr(attention, f"{name}_norm") for name in "qk" if hasattr(attention, f"{name}_norm")]
    norms += [layer.input_layernorm, layer.post_attention_layernorm]
    linears = [getattr(attention, f"{name}_proj") for name in "qkvo"]
    known = all(type(linear) is DenseLinear for linear in linears) and all(map(is_rms_norm, norms))
    return known and gate is not None and gate.weight.dtype == torch.bfloat16


def _norm(module: Any) -> tuple[torch.Tensor, float]:
    return module.weight.data, module.variance_epsilon


def _matrix(module: Any) -> Any:
    from edgemoe.kernels.triton.dense import Matrix

    return Matrix(module.weight.data, getattr(module, "scale", None), getattr(module, "bias", None))
