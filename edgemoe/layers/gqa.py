"""Plain attention of a sequence's latest tokens in a call, where transformers' modules make some thirty."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.attention import MOST_SHARING, NativeAttention, first_seen
from edgemoe.kernels.native.decode_layers import NativeLayer
from edgemoe.kernels.native.experts import HeldExperts
from edgemoe.kernels.native.router import NativeRouter
from edgemoe.kv.sequence import SequenceKV, StepKV
from edgemoe.layers.dense import DenseLinear, DenseNorm


class PlainAttention(nn.Module):
    """Stands in the place of an attention module, and hands it only steps whose attention somebody wants to know.

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
    def like(cls, module: Any) -> PlainAttention | None:
        """One for a plain attention module in RAM, where edgemoe's kernel runs and takes its sizes."""
        linears = [getattr(module, f"{name}_proj") for name in "qkvo"]
        norms = [getattr(module, f"{name}_norm") for name in "qk" if hasattr(module, f"{name}_norm")]
        known = all(type(linear) is DenseLinear for linear in linears)
        known = known and all(type(norm) is DenseNorm for norm in norms)
        if not native.available() or not known or linears[0].weight.device.type != "cpu":
            return None
        if module.head_dim % 16 or getattr(module.config, "clip_qkv", None) is not None:
            return None
        if linears[0].out_features > MOST_SHARING * linears[1].out_features:
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
        if kv.state.signal:
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
        parts = []
        for sequence, row, rows in kv.spans:
            part = slice(row, row + rows)
            keys, values, past, _ = room(sequence, self.layer, window)
            parts.append(
                self._attend(projected[part], (cosine[0, part], sine[0, part]), keys, values, past, window)
            )
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.module.o_proj(attended[None]), None

    def layer_with(
        self,
        before: tuple[torch.Tensor, float],
        behind: tuple[torch.Tensor, float],
        router: NativeRouter | None,
        held: HeldExperts | None,
    ) -> NativeLayer:
        """This attention with the norms, weights and epsilons, before it and behind it, and what comes then."""
        qkv, out = (
            (linear.weight.data, linear.scale, linear.bias) for linear in (self._joined, self.module.o_proj)
        )
        return NativeLayer(self._attend, before, behind, qkv, out, router, held)


def room(sequence: SequenceKV, layer: int, window: int | None) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """A layer's keys and values, how many tokens are valid in them, and the first that a new one sees."""
    past = sequence.length
    return *sequence.slices[sequence.slots[layer]], past, first_seen(past, window)
