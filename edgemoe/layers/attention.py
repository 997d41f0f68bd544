"""Attention over the preallocated KV, registered with transformers under the name `edgemoe`.

Each sequence of a step attends to its own keys. Positions give the causal structure, so a layer gets its window instead
of a mask; the model's own code chooses the window. A feature that is not implemented is refused.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from edgemoe.kernels import threads
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import StepKV
from edgemoe.layers.mla import LatentHeads
from edgemoe.machine.cpu import fast_bf16
from edgemoe.policy.importance import QUERY_BLOCK, attention_weights, hidden_keys
from storage.errors import ModelRefused

NAME = "edgemoe"

_UNSUPPORTED = ("softcap", "position_bias")


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """Computes causal grouped-query attention of a sequence's last rows.

    Args:
        query: [heads, R, D], of the last R of N tokens.
        keys: [kv_heads, N, D]; heads is a multiple of kv_heads.
        values: [kv_heads, N, V], V at most D.
        scaling: factor of the scores.
        window: number of latest tokens that a row attends to, itself included; None: all.

    Returns:
        [heads, R, V] in query's dtype.
    """
    heads, rows, dim = query.shape
    kv_heads, tokens, _ = keys.shape
    dtype, value_dim = query.dtype, values.shape[2]
    if query.device.type == "cpu" and not fast_bf16():
        query, keys, values = query.float(), keys.float(), values.float()
    if value_dim < dim:
        # torch's kernels for unequal sizes store the whole matrix of scores.
        values = F.pad(values, (0, dim - value_dim))
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
            hidden = hidden_keys(range(past, tokens), range(tokens), window, query.device)
            mask = hidden.logical_not_()
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(heads, rows, dim)[..., :value_dim].to(dtype)


def attend_with_sinks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Computes `attend` with one more score per head in the softmax: the score of a token without a value.

    Args:
        query, keys, values, scaling, window: as in attend.
        sinks: [heads], the additional scores.

    Returns:
        [heads, R, V] in query's dtype.
    """
    heads, rows, _ = query.shape
    kv_heads, tokens, _ = keys.shape
    past, out = tokens - rows, []
    for start in range(0, rows, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, rows)
        first = max(past + start + 1 - window, 0) if window else 0
        seen = slice(first, past + end)
        hidden = hidden_keys(range(past + start, past + end), range(first, past + end), window, query.device)
        weights = attention_weights(query[:, start:end], keys[:, seen].float().mT, hidden, scaling, sinks)
        summed = weights.reshape(kv_heads, -1, weights.shape[-1]) @ values[:, seen].float()
        out.append(summed.view(heads, end - start, -1))
    return torch.cat(out, dim=1).to(query.dtype)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    kv: StepKV | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes a layer's attention for all sequences of a step (transformers' attention interface).

    Args:
        module: the layer's attention module.
        query: [1, heads, rows, D].
        key, value: [1, kv_heads, rows, D or V], of the step's rows.
        attention_mask: the layer's window (window_of_mask).
        scaling: factor of the scores.
        kv: the step's state, with the keys and values of this step; its `ranks` are set where it has a `signal`.
        s_aux: [heads], scores of attend_with_sinks.
        kwargs: `softcap` and `position_bias` are refused; others are ignored, `sliding_window` too: some models pass it
            to layers whose mask has no window.

    Returns:
        [1, rows, heads, V], and no attention weights.

    Raises:
        ModelRefused: the model uses a feature of attention that is not implemented.
    """
    assert kv is not None
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ModelRefused(
                f"attention without {name} in {type(module).__name__}",
                f"a value for {name}",
                f"choose a model without {name}",
            )
    window = None if attention_mask is None else int(attention_mask)
    out = value.new_empty(query.shape[1], query.shape[2], value.shape[3])
    kv.ranks = torch.empty(query.shape[2], device=query.device) if kv.signal else None
    for (sequence, row, rows), prompt in zip(kv.spans, kv.prompts, strict=True):
        span = slice(row, row + rows)
        with threads.for_product(query.shape[1] * query.shape[3] * rows * (sequence.length + rows)):
            queries, keys, values = _visible(
                module, sequence, query[0, :, span], key[0, :, span], value[0, :, span]
            )
            if s_aux is None:
                summed = attend(queries, keys, values, scaling, window)
            else:
                summed = attend_with_sinks(queries, keys, values, scaling, window, s_aux)
            out[:, span] = LatentHeads(module).value(summed) if summed.shape[2] != out.shape[2] else summed
            if kv.ranks is not None and kv.signal:
                layer: Any = module.layer_idx
                kv.ranks[span] = prompt.ranks(layer, queries, keys, scaling, window, kv.signal, s_aux)
    return out.transpose(0, 1).unsqueeze(0), None


def _visible(
    module: Any, sequence: SequenceKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a sequence's queries, keys and values, the earlier steps' keys and values included.

    Queries attend to latents, except in a sequence's first step, where the module has expanded the keys and values.
    """
    rows = query.shape[1]
    if sequence.shape.latent and sequence.length == 0:
        return query, key, value
    slot, end = sequence.slots[module.layer_idx], sequence.length + rows
    if sequence.shape.latent:
        query = LatentHeads(module).query(query)
    return query, sequence.keys[slot, :, :end], sequence.values[slot, :, :end]


def window_of_mask(
    *, allow_is_causal_skip: bool = True, local_size: int | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """Returns a layer's window, int64 []; None where each row attends to all rows before it.

    Implements transformers' mask interface.

    Raises:
        ModelRefused: the model needs a mask that is not causal.
    """
    if not allow_is_causal_skip:
        raise ModelRefused(
            "causal attention", "a mask of the model's own", "choose a model with causal attention"
        )
    return torch.tensor(local_size) if local_size else None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, window_of_mask)
