"""Attention over the preallocated KV, registered with transformers under the name `edgemoe`.

Each sequence of a step attends to its own keys. The causal structure follows from positions, so in the place of a
mask a layer gets its window, as the model's own code chooses it; what is not understood is refused rather than
ignored.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from edgemoe.kernels import threads
from edgemoe.kernels.torch_int4 import fast_bf16
from edgemoe.kv.sequence import SequenceKV, StepKV
from edgemoe.layers.mla import LatentHeads
from edgemoe.policy.importance import QUERY_BLOCK, token_scores
from storage.errors import ModelRefused

NAME = "edgemoe"

_NOT_UNDERSTOOD = ("softcap", "position_bias")


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """Causal grouped-query attention of a sequence's last rows.

    Args:
        query: [heads, R, D], the last R of the N tokens.
        keys: [kv_heads, N, D]; heads is a multiple of kv_heads.
        values: [kv_heads, N, V], V at most D.
        scaling: factor on the scores.
        window: how many of the latest tokens a row sees, itself included; None: all.

    Returns:
        [heads, R, V] in query's dtype.
    """
    heads, rows, dim = query.shape
    kv_heads, tokens, _ = keys.shape
    dtype, wanted = query.dtype, values.shape[2]
    if query.device.type == "cpu" and not fast_bf16():
        query, keys, values = query.float(), keys.float(), values.float()
    if wanted < dim:
        # torch's kernels for unequal sizes keep the whole matrix of scores.
        values = F.pad(values, (0, dim - wanted))
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
    return out.reshape(heads, rows, dim)[..., :wanted].to(dtype)


def attend_with_sinks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """`attend` where each head has one more score, of a token without a value, that takes its share of the softmax.

    Args:
        query, keys, values, scaling, window: of attend.
        sinks: [heads], the scores.

    Returns:
        [heads, R, V] in query's dtype.
    """
    heads, rows, dim = query.shape
    kv_heads, tokens, _ = keys.shape
    past, out = tokens - rows, []
    for start in range(0, rows, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, rows)
        first = max(past + start + 1 - window, 0) if window else 0
        seen = slice(first, past + end)
        block = query[:, start:end].reshape(kv_heads, -1, dim).float() * scaling
        scores = (block @ keys[:, seen].float().mT).view(heads, end - start, -1)
        position = torch.arange(past + start, past + end, device=query.device)[:, None]
        key_position = torch.arange(first, past + end, device=query.device)
        hidden = key_position > position
        if window:
            hidden |= key_position <= position - window
        scores.masked_fill_(hidden, -torch.inf)
        sink = sinks.float()[:, None, None].expand(-1, end - start, 1)
        shares = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        summed = shares.reshape(kv_heads, -1, shares.shape[-1]) @ values[:, seen].float()
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
    """transformers' attention interface: query [1, heads, rows, D] -> [1, rows, heads, V].

    `kv` is the step's, handed through the model's keyword arguments; keys and values of this step are
    already in it, unless the step is being noted. `attention_mask` is the layer's window (window_of_mask);
    `sliding_window` among the other arguments is what some models pass to layers whose mask has none, and is not
    looked at. Where the experts want to know, the attention every row receives goes to the step's state.
    """
    assert kv is not None
    for name in _NOT_UNDERSTOOD:
        if kwargs.get(name) is not None:
            raise ModelRefused(
                f"attention of {type(module).__name__} was wanted",
                f"it uses {name}, which this attention does not implement",
                "Choose a model without it",
            )
    window = None if attention_mask is None else int(attention_mask)
    if kv.state.between is None:
        return _attention(module, query, key, value, window, scaling, kv, s_aux), None

    def work(kv: StepKV) -> torch.Tensor:
        kv.write(module.layer_idx, key, value)  # type: ignore[arg-type]  # a module's attributes have no types
        return _attention(module, query, key, value, window, scaling, kv, s_aux)

    return kv.state.between(work), None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scaling: float,
    kv: StepKV,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """query [1, heads, rows, D] -> [1, rows, heads, V]; see attention."""
    out = value.new_empty(query.shape[1], query.shape[2], value.shape[3])
    state = kv.state
    state.scores = torch.empty(query.shape[2], device=query.device) if state.signal else None
    for sequence, row, rows in kv.spans:
        part = slice(row, row + rows)
        with threads.for_product(query.shape[1] * query.shape[3] * rows * (sequence.length + rows)):
            own, keys, values = _visible(
                module, sequence, query[0, :, part], key[0, :, part], value[0, :, part]
            )
            if s_aux is None:
                summed = attend(own, keys, values, scaling, window)
            else:
                summed = attend_with_sinks(own, keys, values, scaling, window, s_aux)
            out[:, part] = LatentHeads(module).value(summed) if summed.shape[2] != out.shape[2] else summed
            if state.scores is not None and state.signal:
                state.scores[part] = token_scores(own, keys, scaling, window, state.signal, s_aux)
    return out.transpose(0, 1).unsqueeze(0)


def _visible(
    module: Any, sequence: SequenceKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A sequence's queries, and all keys and values so far: its cache's, or the step's own where they are all.

    Latents are attended to as they are, but for a sequence that begins with this step: its keys and values
    are here already.
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
    """transformers' mask interface: a layer's window, int64 [], or None where every row sees all before it.

    Raises:
        ModelRefused: the model wants a mask that is not causal.
    """
    if not allow_is_causal_skip:
        raise ModelRefused(
            "causal attention was wanted",
            "the model masks attention in a way of its own",
            "Choose a model without it",
        )
    return torch.tensor(local_size) if local_size else None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, window_of_mask)
