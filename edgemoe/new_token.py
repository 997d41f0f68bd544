"""Attention of sequences that go on by one token: what transformers' module does in some thirty operators, in three."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgemoe.dense import DenseLinear, DenseNorm
from edgemoe.kernels import native
from edgemoe.kernels.native_attention import NativeAttention
from edgemoe.kv import SequenceKV, StepKV


class NewTokenAttention(nn.Module):
    """Stands in the place of an attention module, and hands it every step but those of one token a sequence.

    Args:
        module: q_proj, k_proj, v_proj and o_proj, perhaps q_norm and k_norm, halves rotated, and causal
            attention, perhaps in a window: nothing else (Family.plain_attention).
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.layer = module, module.layer_idx
        self._joined = DenseLinear.joined((module.q_proj, module.k_proj, module.v_proj))
        dim = module.head_dim
        heads, kv_heads = (linear.out_features // dim for linear in (module.q_proj, module.k_proj))
        norms = None
        if hasattr(module, "q_norm"):
            q, k = module.q_norm, module.k_norm
            norms = (q.weight.data, q.variance_epsilon), (k.weight.data, k.variance_epsilon)
        self._attend = NativeAttention(heads, kv_heads, dim, norms, module.scaling)

    @classmethod
    def like(cls, module: Any) -> NewTokenAttention | None:
        """One for a plain attention module in RAM, where edgemoe's kernel runs and takes its sizes."""
        linears = [getattr(module, f"{name}_proj") for name in "qkv"]
        norms = [getattr(module, f"{name}_norm") for name in "qk" if hasattr(module, f"{name}_norm")]
        known = all(type(linear) is DenseLinear for linear in linears)
        known = known and all(type(norm) is DenseNorm for norm in norms)
        if not native.available() or not known or linears[0].weight.device.type != "cpu":
            return None
        if module.head_dim % 16 or getattr(module.config, "clip_qkv", None) is not None:
            return None
        return cls(module)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        past_key_values: StepKV | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' interface of an attention module: bf16 [1, rows, H] -> the same.

        `attention_mask` is the layer's window (attention.window_of_mask).
        """
        kv = past_key_values
        assert kv is not None
        if kv.state.signal or any(rows > 1 for _, _, rows in kv.spans):
            out: tuple[torch.Tensor, None] = self.module(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                past_key_values=kv,
                **kwargs,
            )
            return out
        kv.state.scores = None
        window = None if attention_mask is None else int(attention_mask)
        cosine, sine = position_embeddings
        projected = self._joined(hidden_states[0])
        rows = [
            self._row(sequence, projected[row], (cosine[0, row], sine[0, row]), window)
            for sequence, row, _ in kv.spans
        ]
        attended = rows[0][None, None] if len(rows) == 1 else torch.stack(rows)[None]
        return self.module.o_proj(attended), None

    def _row(
        self,
        sequence: SequenceKV,
        projected: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        window: int | None,
    ) -> torch.Tensor:
        slot, past = sequence.slots[self.layer], sequence.length
        first = max(past + 1 - window, 0) if window else 0
        return self._attend(projected, rotation, sequence.keys[slot], sequence.values[slot], past, first)
