"""Plain grouped-query attention in one kernel call for each sequence, where transformers' modules make some thirty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from edgemoe.kernels.native.attention import NativeAttention, kernel_fits
from edgemoe.kernels.native.attention_rows import LayerKV, Received, ValueForm
from edgemoe.kernels.native.functions import values_of
from edgemoe.kernels.program import NORMED, Attend, Linear, Operation, Scale
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import StepKV
from edgemoe.layers.dense import DenseLinear, DenseNorm
from edgemoe.layers.rotation_form import RotationForm
from edgemoe.policy.importance import first_counted


class GroupedQueryAttention(nn.Module):
    """Computes an attention module's rows, and the attention that a prompt's tokens receive.

    Args:
        module: the module of a family with fused_gqa: q_proj, k_proj, v_proj and o_proj, perhaps norms of queries and
            keys, all perhaps under other names (_OUT, _NORMS). Where it has a gate (_GATES), or q_proj has twice the
            rows that o_proj takes, and the second half of each head's is a gate, the attention is multiplied by a
            function of the gate: one number for each of its own, or for each head. A v_norm norms values, which may be
            shorter than keys and have a factor; without v_proj the projected keys are the values.
        rotation: index of its rotation in the list of the step's rotations (layers.rotations).
        rotated: leading numbers of each head that are rotated by its position.
        form: the numbers that are rotated together; an attribute too.
    """

    def __init__(self, module: Any, rotation: int, rotated: int, form: RotationForm) -> None:
        super().__init__()
        self.layer, self._rotation, self.form = module.layer_idx, rotation, form
        dim, self.out, own = module.head_dim, _out(module), _values(module)
        heads, kv_heads = _heads(module)
        queries = module.q_proj
        self.gate, self._gating = _gate(module)
        if queries.out_features == 2 * heads * dim:
            halves = torch.arange(queries.out_features).view(heads, 2, dim)
            queries, self.gate = (module.q_proj.rows(halves[:, half].flatten()) for half in (0, 1))
        self.qkv = DenseLinear.joined([queries, *_keys_and_values(module)])
        norms, (found, norms_last) = None, _norms(module)
        if found:
            q, k = found
            norms = (q.weight.data, q.variance_epsilon), (k.weight.data, k.variance_epsilon)
        clip = getattr(module.config, "clip_qkv", None)
        sinks = getattr(module, "sinks", None)
        self.native = NativeAttention(
            *(heads, kv_heads, dim, norms, module.scaling, clip),
            rotated=rotated,
            sinks=sinks,
            values=own,
            pairing=form.pairing,
            norms_last=norms_last,
            queries_alone=form.queries_alone,
        )

    @classmethod
    def try_from(
        cls, module: Any, rotation: int, rotated: int, form: RotationForm | None
    ) -> GroupedQueryAttention | None:
        """Wraps a module in RAM whose sizes and rotation the kernel supports; None elsewhere."""
        if getattr(module, "is_kv_shared_layer", False) or getattr(module, "store_full_length_kv", False):
            return None
        linears = [module.q_proj, *_keys_and_values(module), _out(module)]
        linears += [gate] if (gate := _gate(module)[0]) is not None else []
        known = all(type(linear) is DenseLinear for linear in linears)
        known = known and all(type(norm) is DenseNorm for norm in _norms(module)[0])
        if form is None or not known or linears[0].weight.device.type != "cpu":
            return None
        if not kernel_fits(*_heads(module), module.head_dim):
            return None
        return cls(module, rotation, rotated, form)

    def operations(self) -> list[Operation]:
        """From the normed state to what the last product takes."""
        qkv = Linear(NORMED, "qkv", self.qkv.parts)
        gated: list[Operation] = []
        if self.gate is not None:
            gate = Linear(NORMED, "gate", self.gate.parts)
            gated = [gate, Scale("gate", "attended", values_of(self._gating))]
        return [qkv, Attend("qkv", "attended", self.native, self._rotation), *gated]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: StepKV | None = None,
        attention_scaling: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """bf16 [1, rows, H] -> bf16 [1, rows, H]: transformers' interface of an attention module.

        `attention_mask` is the layer's window (attention.window_of_mask).
        """
        if attention_scaling is not None:
            position_embeddings = scaled_queries(attention_scaling, self.native.rotated)
        kv = past_key_values
        assert kv is not None
        window = None if attention_mask is None else int(attention_mask)
        if position_embeddings is None or not self.native.rotated:
            position_embeddings = hidden_states[..., :0].contiguous(), hidden_states[..., :0].contiguous()
        ahead = kv.ahead if window else None
        cosine, sine = self.form.tables(position_embeddings, self.native.rotated)
        projected = self.qkv(hidden_states[0])
        attended = []
        for index, (sequence, row, rows) in enumerate(kv.spans):
            sequence.pass_window(self.layer, window, rows)
            part = slice(row, row + rows)
            rotation, received = (cosine[0, part], sine[0, part]), sums_of(kv, index)
            seen = None if ahead is None else ahead[part]
            stored = layer_kv(sequence, self.layer)
            attended.append(self.native(projected[part], rotation, stored, window, received, seen))
            if received:
                kv.receive(kv.places[index], kv.prompts[index], self.layer, received.sums, window)
        whole = torch.cat(attended) if len(attended) > 1 else attended[0]
        if self.gate is not None:
            gate = self._gating(self.gate(hidden_states[0])).unsqueeze(-1)
            whole.view(*gate.shape[:2], -1).mul_(gate)
        return self.out(whole[None]), None


def scaled_queries(factors: torch.Tensor, numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rotation that multiplies queries with a factor: cosine and sine, float32 [1, rows, numbers] each.

    Args:
        factors: float32 [1, 1, rows, 1], a factor for each position.
        numbers: numbers of a head.
    """
    cosine = factors[:, 0].expand(1, -1, numbers).contiguous()
    return cosine, torch.zeros_like(cosine)


_OUT = ("o_proj", "out_proj")
"""Names of an attention module's last product."""

_NORMS = {
    ("q_norm", "k_norm"): False,
    ("q_layernorm", "k_layernorm"): False,
    ("query_layernorm", "key_layernorm"): True,
}
"""Names of its norms of queries and of keys -> whether they come after the rotation."""


def _soft_plus(x: torch.Tensor) -> torch.Tensor:
    return F.softplus(x.float()).to(x.dtype)


_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gate_proj": torch.sigmoid, "g_proj": _soft_plus}
"""Names of the layer of its gate -> the gate's function."""


def _gate(module: Any) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """The layer of an attention module's gate, None where it has none, and the gate's function."""
    named = ((getattr(module, name, None), function) for name, function in _GATES.items())
    gate, function = next((found for found in named if found[0] is not None), (None, torch.sigmoid))
    bias = getattr(module, "gate_bias", None)
    if bias is not None and type(gate) is DenseLinear:
        of_numbers = bias.data.repeat_interleave(gate.out_features // bias.numel())
        gate = DenseLinear(gate.weight.data, gate.scale, of_numbers, gate.names)
    return gate, function


def _out(module: Any) -> Any:
    return next(found for name in _OUT if (found := getattr(module, name, None)) is not None)


def _norms(module: Any) -> tuple[list[Any], bool]:
    """The norms of queries and of keys of an attention module, and whether they come last; none where it has none."""
    pairs = (([getattr(module, name, None) for name in names], last) for names, last in _NORMS.items())
    return next((pair for pair in pairs if all(norm is not None for norm in pair[0])), ([], False))


def _keys_and_values(module: Any) -> list[Any]:
    """The projections of keys and values; one alone where keys are the values as well."""
    return [module.k_proj] if module.v_proj is None else [module.k_proj, module.v_proj]


def _values(module: Any) -> ValueForm:
    """How an attention module makes values."""
    norm, scale = getattr(module, "v_norm", None), float(getattr(module, "v_scale", 1))
    normed = None if norm is None else (torch.ones(module.head_dim), norm.eps)
    return ValueForm(_value_dim(module), normed, 0.0 if scale == 1 else scale, are_keys=module.v_proj is None)


def _value_dim(module: Any) -> int:
    """Numbers of a value of an attention module."""
    found: int = getattr(module, "v_head_dim", module.head_dim)
    return found


def _heads(module: Any) -> tuple[int, int]:
    """Numbers of heads of queries, and of keys and values, of an attention module."""
    return _out(module).in_features // _value_dim(module), module.k_proj.out_features // module.head_dim


def layer_kv(sequence: SequenceKV, layer: int) -> LayerKV:
    """Returns the keys and values of a sequence in one layer, as the compiled kernel reads them."""
    keys, values = sequence.slices[sequence.slots[layer]]
    shape, rows = sequence.shapes[layer], sequence.window_rows.get(layer)
    moved = rows.moved if rows else 0
    return LayerKV(keys, keys if shape.latent else values, sequence.length, shape.format, shape.latent, moved)


def sums_of(kv: StepKV, index: int) -> Received | None:
    """Returns room for the attention that the tokens of a sequence receive; None where the step counts none.

    Args:
        kv: state of the step.
        index: place of the sequence in the step.
    """
    if not kv.signal:
        return None
    (sequence, _, rows), place = kv.spans[index], kv.places[index]
    return Received(torch.empty(sequence.length + rows), first_counted(kv.signal, place.part, place.rows))
