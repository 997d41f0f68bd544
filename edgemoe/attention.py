"""Attention over the preallocated KV, registered with transformers under the name `edgemoe`.

Each sequence of a step attends to its own keys. The causal structure follows from positions, so no mask is
ever built by transformers for this name; a sliding window is honoured, and what is not understood is refused
rather than ignored.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from edgemoe.importance import token_scores
from edgemoe.kernels.cpu import fast_bf16
from edgemoe.kv import StepKV
from storage.errors import ModelRefused

NAME = "edgemoe"

_NOT_UNDERSTOOD = ("s_aux", "softcap", "position_bias")


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """Causal grouped-query attention of a sequence's last rows.

    Args:
        query: [heads, R, D], the last R of the N tokens.
        keys, values: [kv_heads, N, D]; heads is a multiple of kv_heads.
        scaling: factor on the scores.
        window: how many of the latest tokens a row sees, itself included; None: all.

    Returns:
        [heads, R, D] in query's dtype.
    """
    heads, rows, dim = query.shape
    kv_heads, tokens, _ = keys.shape
    dtype = query.dtype
    if not fast_bf16():
        query, keys, values = query.float(), keys.float(), values.float()
    grouped = query.reshape(kv_heads, heads // kv_heads, rows, dim)
    past = tokens - rows
    if rows == 1:
        start = max(tokens - window, 0) if window else 0
        out = F.scaled_dot_product_attention(
            grouped.transpose(1, 2), keys[:, None, start:], values[:, None, start:], scale=scaling
        ).transpose(1, 2)
    else:
        shape = (kv_heads, heads // kv_heads, tokens, dim)
        keys, values = keys[:, None].expand(shape), values[:, None].expand(shape)
        if past == 0 and not (window and window < tokens):
            out = F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scaling)
        else:
            position = torch.arange(past, tokens, device=query.device)[:, None]
            key_position = torch.arange(tokens, device=query.device)
            mask = key_position <= position
            if window:
                mask &= key_position > position - window
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(heads, rows, dim).to(dtype)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    kv: StepKV | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, heads, rows, D] -> [1, rows, heads, D].

    `kv` is the step's, handed through the model's keyword arguments; keys and values of this step are
    already in it. Where the experts want to know, the attention every row receives goes to the step's state.
    """
    assert kv is not None
    assert attention_mask is None
    for name in _NOT_UNDERSTOOD:
        if kwargs.get(name) is not None:
            raise ModelRefused(
                f"attention of {type(module).__name__} was wanted",
                f"it uses {name}, which this attention does not implement",
                "Choose a model without it",
            )
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = torch.empty_like(query[0])
    state = kv.state
    state.scores = torch.empty(query.shape[2]) if state.signal else None
    for sequence, row, rows in kv.spans:
        end = sequence.length + rows
        own, keys = query[0, :, row : row + rows], sequence.keys[layer, :, :end]
        out[:, row : row + rows] = attend(own, keys, sequence.values[layer, :, :end], scaling, sliding_window)
        if state.scores is not None and state.signal:
            state.scores[row : row + rows] = token_scores(own, keys, scaling, sliding_window, state.signal)
    return out.transpose(0, 1).unsqueeze(0), None


AttentionInterface.register(NAME, attention)
