"""The launches that a new token consists of: its embedding, a layer up to its router's report, experts, the head.

begin       memory.token ─► memory.hidden; memory.position ─► memory.cosine, memory.sine
layers[i]   the sum of the experts before it ─ attention ─ router ─► memory.reporting
compute     memory.items ─► memory.rows
end         the sum of the last experts ─ norm ─ head ─► memory.outcome; the next token ─► memory.state
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from edgemoe.families.table import traits_of
from edgemoe.kernels.activation import CUSTOM
from edgemoe.kv.formats import KVFormat
from edgemoe.layers.decoder_parts import outer_parts, parts_of
from edgemoe.layers.dense import DenseLinear, is_rms_norm
from edgemoe.layers.embedding import DenseEmbedding
from edgemoe.layers.graph.base import Launch, nothing
from edgemoe.layers.graph.memory import GraphMemory
from edgemoe.machine.device import Device


class GraphLaunches:
    """Captured launches of a model, which read and write the places of one GraphMemory.

    Args:
        device: Computes the launches.
        model: Model of layers.build, whose layers all fit (`fits`).
        windows: Latest tokens that each layer attends to; 0: all.
        kernel: TritonExpertKernel of the model's experts.
        memory: Memory of the launches.
        form: How keys and values of every sequence are stored.

    Attributes:
        begin: Launches the embedding and the rotation of a token. Not captured, as layers and end, so that a whole
            token can be captured as one.
        layers: Launches each layer up to its router's report on the device.
        end: Launches the sum of the last experts, the norm, the head and the choice of the next token.
        reports: Launches each layer, and the copy of its router's report to the host.
        experts: Launches the experts of a table, by the table's number.
        moe, rests: As in base.Launches; the next layer's launch, or the end, sums a layer's experts.
    """

    def __init__(
        self,
        device: Device,
        model: Any,
        windows: Sequence[int],
        kernel: Any,
        memory: GraphMemory,
        form: KVFormat,
    ) -> None:
        self._form = form
        self._memory, self._kernel, self._blocks = memory, kernel, list(model.model.layers)
        self._activation = self._blocks[0].mlp.experts.edgemoe.activation
        gate = traits_of(model.config.model_type).gate
        assert gate
        self._normalise, self._rounded = bool(gate.normalise(model.config)), gate.rounded
        self.moe, self.rests = range(len(self._blocks)), [nothing] * len(self._blocks)
        self._first_kv = self._kv_of_one_token()
        memory.set_state(
            0, 0, np.tile([*(each.data_ptr() for each in self._first_kv), 1], (len(self._blocks), 1))
        )
        with torch.inference_mode():
            self.layers = [self._layer(index, window) for index, window in enumerate(windows)]
            self.begin, self.end = self._begin(model), self._end(model)
            self.reports = [device.capture(partial(self._report, launch)) for launch in self.layers]
            self.experts = [
                device.capture(partial(self._launch_table, table)) for table in range(memory.slots)
            ]
            device.await_computed()

    def layer(self, layer: int, experts: Launch) -> None:
        """Launches a layer, and its experts."""
        self.layers[layer]()
        experts()

    def compute(self) -> None:
        """Launches the experts of the memory's items."""
        memory = self._memory
        self._kernel.launch_rows(memory.items, memory.normed, self._activation, memory.inner, memory.rows)

    def _kv_of_one_token(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes keys and values of a token, bf16 [kv_heads, dim], which the captures read and write in every layer.

        Codes take fewer bytes.
        """
        attention = self._blocks[0].self_attn
        size = attention.k_proj.out_features
        return self._memory.hidden.new_zeros(size), self._memory.hidden.new_zeros(size)

    def _report(self, launch: Launch) -> None:
        launch()
        self._memory.reported.copy_(self._memory.reporting, non_blocking=True)

    def _launch_table(self, table: int) -> None:
        self._memory.send_table(table)
        self.compute()

    def _layer(self, index: int, window: int) -> Launch:
        """Launches a layer, from the sum of the experts before it to its router's report on the device."""
        from edgemoe.kernels.triton.attention import RowAttention
        from edgemoe.kernels.triton.dense import add_and_normalise, multiply
        from edgemoe.kernels.triton.router import choose_experts

        memory, layer = self._memory, self._blocks[index]
        module, before, after = layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm
        dim = module.head_dim
        heads, kv_heads = module.q_proj.out_features // dim, module.k_proj.out_features // dim
        norms = (_norm(module.q_norm), _norm(module.k_norm)) if hasattr(module, "q_norm") else None
        attention = RowAttention(heads, kv_heads, dim, norms, module.scaling, window, index, form=self._form)
        projections = [_matrix(getattr(module, f"{name}_proj")) for name in "qkv"]
        out = [_matrix(module.o_proj)]
        # The last layer's prediction, by its own router, is not used.
        following = self._blocks[min(index + 1, len(self._blocks) - 1)]
        routers = [_matrix(each.mlp.gate) for each in (layer, following)]
        rows, gates = (memory.rows, memory.gates) if index else (None, None)
        rules = {"normalise": self._normalise, "rounded": self._rounded}

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
            choose_experts(memory.router_logits, memory.reporting, memory.slots, **rules)

        return launch

    def _begin(self, model: Any) -> Launch:
        """Launches the embedding of the memory's token, and its position's rotation to the bits of transformers."""
        from edgemoe.kernels.triton.token import embed

        memory, table = self._memory, _matrix(model.model.embed_tokens)
        factor = float(model.model.rotary_emb.attention_scaling)

        def launch() -> None:
            embed(memory.token, table.weight, table.scale, memory.hidden)
            torch.mul(memory.frequencies, memory.position, out=memory.angles)
            for turn, result in ((torch.cos, memory.cosine), (torch.sin, memory.sine)):
                if factor == 1:
                    result.copy_(turn(memory.angles, out=memory.turned))
                else:
                    result.copy_(torch.mul(turn(memory.angles, out=memory.turned), factor, out=memory.turned))

        return launch

    def _end(self, model: Any) -> Launch:
        from edgemoe.kernels.triton.dense import add_and_normalise, multiply

        memory, norm, head = self._memory, _norm(model.model.norm), [_matrix(model.lm_head)]

        def launch() -> None:
            add_and_normalise(memory.rows, memory.gates, memory.hidden, *norm, memory.normed)
            multiply(memory.normed, head, memory.head)
            memory.choose(memory.head)

        return launch


def outer_fits(model: Any) -> bool:
    """Whether embedding, rotation, last norm and head of a model have kernels."""
    outer, rotary = outer_parts(model), model.model.rotary_emb
    dense = (type(outer.embedding), type(outer.head)) == (DenseEmbedding, DenseLinear)
    plain = hasattr(rotary, "inv_freq") and hasattr(rotary, "attention_scaling")
    known = plain and 2 * rotary.inv_freq.numel() == model.model.layers[0].self_attn.head_dim
    unscaled = (outer.factor, outer.divisor, outer.multiplier) == (1, 1, 1)
    return dense and known and is_rms_norm(outer.norm) and outer.embedding.factor is None and unscaled


def fits(layer: Any) -> bool:
    """Whether attention, norms, router and experts of a layer have kernels."""
    parts = parts_of(layer)
    if [(part.name, part.factor, part.after) for part in parts] != [("self_attn", 0, None), ("mlp", 0, None)]:
        return False
    if parts[0].norm is parts[1].norm:
        return False
    attention, gate = layer.self_attn, getattr(layer.mlp, "gate", None)
    experts = getattr(getattr(layer.mlp, "experts", None), "edgemoe", None)
    if experts is None or experts.activation.name == CUSTOM or attention.head_dim % 2:
        return False
    norms = [getattr(attention, f"{name}_norm") for name in "qk" if hasattr(attention, f"{name}_norm")]
    norms += [part.norm for part in parts]
    linears = [getattr(attention, f"{name}_proj") for name in "qkvo"]
    known = all(type(linear) is DenseLinear for linear in linears) and all(map(is_rms_norm, norms))
    return known and gate is not None and gate.weight.dtype == torch.bfloat16


def _norm(module: Any) -> tuple[torch.Tensor, float]:
    return module.weight.data, module.variance_epsilon


def _matrix(module: Any) -> Any:
    from edgemoe.kernels.triton.dense import Matrix

    return Matrix(module.weight.data, getattr(module, "scale", None), getattr(module, "bias", None))
