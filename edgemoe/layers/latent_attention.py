"""Multi-head latent attention in one kernel call for each sequence, between the products of transformers' module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgemoe.kernels.native.attention import StoredAttention, kernel_fits
from edgemoe.kernels.native.functions import values_of
from edgemoe.kernels.native.latents import (
    HALVES,
    PAIRS,
    UNROTATED,
    WIDE_PAIRS,
    NativeLatents,
    ProjectedRows,
)
from edgemoe.kernels.program import (
    NORMED,
    Attend,
    LatentQueries,
    LatentValues,
    Linear,
    Multiply,
    Norm,
    Operation,
    Scale,
    StoreLatents,
)
from edgemoe.kv.step import StepKV
from edgemoe.layers.dense import DenseLinear, DenseNorm
from edgemoe.layers.gqa import layer_kv, sums_of
from edgemoe.layers.mla import CompiledLatents
from edgemoe.layers.rotation_form import RotationForm
from edgemoe.layers.rotations import LayerRotation


class LatentAttention(nn.Module):
    """Computes an attention module's rows, and the attention that a prompt's tokens receive.

    Args:
        module: transformers' module, with `latents` of layers.mla. Where it has a g_proj, each head's result is
            multiplied by the sigmoid of a number of it.
        rotation: how positions rotate queries and keys, and the factors that queries are multiplied with.

    Attributes:
        out: its last product.
    """

    def __init__(self, module: Any, rotation: LayerRotation) -> None:
        super().__init__()
        rotated, self._factors = rotation.rotated > 0, rotation.factors
        self.layer, self.out = module.layer_idx, module.o_proj
        self._rotary = module.qk_rope_head_dim if rotated else 0
        self.gate: DenseLinear | None = getattr(module, "g_proj", None)
        low = _low_rank(module)
        self.first: DenseLinear | None = module.q_a_proj if low else None
        self.norm: DenseNorm | None = module.q_a_layernorm if low else None
        self.queries = module.q_b_proj if low else module.q_proj
        self.compressed, self.heads = module.kv_a_proj_with_mqa, module.kv_b_proj
        self.native = _latents_of(module, rotated=rotated)
        self._attention = StoredAttention(self.native.heads, 1, self.native.stored, module.scaling)

    @classmethod
    def try_from(cls, module: Any, rotation: LayerRotation) -> LatentAttention | None:
        """Wraps a module whose parts have native forms; None for others."""
        if not isinstance(getattr(module, "latents", None), CompiledLatents) or hasattr(module, "indexer"):
            return None
        names = ["kv_a_proj_with_mqa", "o_proj"]
        names += ["q_a_proj", "q_b_proj"] if _low_rank(module) else ["q_proj"]
        names += ["g_proj"] if hasattr(module, "g_proj") else []
        norms = [module.kv_a_layernorm] + ([module.q_a_layernorm] if _low_rank(module) else [])
        known = all(type(getattr(module, name)) is DenseLinear for name in names)
        known = known and all(type(norm) is DenseNorm for norm in norms)
        size = module.kv_lora_rank + module.qk_rope_head_dim
        return cls(module, rotation) if known and kernel_fits(module.num_heads, 1, size) else None

    def operations(self) -> list[Operation]:
        """The operations between the normed state and the input of the last product."""
        latents = self.native
        factors = [Multiply("queries", "queries", None, self._factors.number)] if self._factors else []
        gated: list[Operation] = []
        if self.gate is not None:
            gate = Linear(NORMED, "gate", self.gate.parts)
            gated = [gate, Scale("gate", "attended", values_of(torch.sigmoid))]
        return [
            *self._query_operations(),
            *factors,
            Linear(NORMED, "compressed", self.compressed.parts),
            StoreLatents("compressed", "compressed", latents),
            LatentQueries("queries", "as_keys", latents),
            Attend("as_keys", "summed", self._attention),
            LatentValues("summed", "attended", latents),
            *gated,
        ]

    def _query_operations(self) -> list[Operation]:
        if self.first is None or self.norm is None:
            return [Linear(NORMED, "queries", self.queries.parts)]
        return [
            Linear(NORMED, "low", self.first.parts),
            Norm("low", "low", self.norm.weight.data, self.norm.variance_epsilon),
            Linear("low", "queries", self.queries.parts),
        ]

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: StepKV | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """bf16 [1, rows, H] -> bf16 [1, rows, H]: transformers' interface of an attention module.

        `attention_mask` is the layer's window (attention.window_of_mask).
        """
        kv = past_key_values
        assert kv is not None
        window = None if attention_mask is None else int(attention_mask) or None
        if position_embeddings is None or not self._rotary:
            position_embeddings = hidden_states[..., :0].contiguous(), hidden_states[..., :0].contiguous()
        cosine, sine = RotationForm().tables(position_embeddings, self._rotary)
        queries = self._queries_of(hidden_states, position_ids)
        projected = queries[0], self.compressed(hidden_states)[0], cosine[0], sine[0]
        attended = []
        for index, (sequence, row, rows) in enumerate(kv.spans):
            sequence.pass_window(self.layer, window, rows)
            of_sequence = ProjectedRows(*(each[row : row + rows] for each in projected))
            received = sums_of(kv, index)
            attended.append(
                self.native.attend(
                    of_sequence, self._attention, layer_kv(sequence, self.layer), window, received
                )
            )
            if received:
                kv.receive(kv.places[index], kv.prompts[index], self.layer, received.sums, window)
        whole = torch.cat(attended) if len(attended) > 1 else attended[0]
        if self.gate is not None:
            by_head = self.gate(hidden_states[0]).sigmoid_()
            whole.view(*by_head.shape, -1).mul_(by_head[..., None])
        return self.out(whole[None]), None

    def _queries_of(self, hidden: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Queries bf16 [1, rows, heads * (key + rotary)] of states bf16 [1, rows, H] at positions int64 [1, rows]."""
        low = hidden
        if self.first is not None and self.norm is not None:
            low = self.norm(self.first(hidden))
        queries: torch.Tensor = self.queries(low)
        if self._factors is None:
            return queries
        assert positions is not None
        return queries * self._factors.of(positions)


def _low_rank(module: Any) -> bool:
    """Whether queries are made by two products."""
    return getattr(module, "q_lora_rank", None) is not None


def _latents_of(module: Any, *, rotated: bool) -> NativeLatents:
    """The compiled form of what is no product of the module's layers."""
    norm, config = module.kv_a_layernorm, module.config
    pairing = PAIRS if getattr(config, "rope_interleave", True) else HALVES
    if config.model_type == "deepseek_v2":  # positions are complex numbers
        pairing = WIDE_PAIRS
    weights = norm.weight.data, norm.variance_epsilon
    rotary = module.qk_rope_head_dim
    return NativeLatents(module.latents.matrices, rotary, weights, pairing if rotated else UNROTATED)
