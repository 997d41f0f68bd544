"""Attention over the preallocated KV, registered with transformers under the name `edgemoe`.

Each sequence of a step attends to its own keys. Positions give the causal structure, so a layer gets its window instead
of a mask; the model's own code chooses the window. A feature that is not implemented is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from edgemoe.errors import ModelRefused
from edgemoe.kernels import threads
from edgemoe.kv.formats import TILE, TILE_QUERIES
from edgemoe.kv.rows import rotate
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import StepKV
from edgemoe.layers.mla import LatentHeads
from edgemoe.machine.cpu import fast_bf16
from edgemoe.policy.importance import attention_received, first_counted, hidden_keys

NAME = "edgemoe"

_UNSUPPORTED = ("softcap", "position_bias")

_LOWEST = -1e30
"""A score below all others."""

Read = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""(first, end) -> keys and values of these tokens, as SequenceKV.read."""


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
        if rows == 1:
            return attend_tiles(
                query, lambda first, end: (keys[:, first:end], values[:, first:end]), tokens, scaling, window
            )
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


def attend_tiles(
    query: torch.Tensor,
    read: Read,
    tokens: int,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `attend` over keys and values of which only TILE tokens are float32 at once.

    A running largest score and sum make the softmax (FlashAttention, Dao et al. 2022).

    Args:
        query: [heads, R, D], of the last R tokens.
        read: (first, end) -> keys [kv_heads, n, D] and values [kv_heads, n, V] of these tokens.
        tokens: N.
        scaling, window: as in attend.
        sinks: [heads], one more score per head in the softmax: the score of a token without a value; None: none.

    Returns:
        [heads, R, V] in query's dtype.
    """
    heads, rows, _ = query.shape
    past = tokens - rows
    first = max(past + 1 - window, 0) if window else 0
    wide = query.float() * scaling
    blocks = [range(start, min(start + TILE_QUERIES, rows)) for start in range(0, rows, TILE_QUERIES)]
    running = [_Running.of(heads, len(block), sinks, query.device) for block in blocks]
    for start in range(first // TILE * TILE, tokens, TILE):
        end = min(start + TILE, tokens)
        keys, values = (part.float() for part in read(start, end))
        for block, state in zip(blocks, running, strict=True):
            positions = range(past + block.start, past + block.stop)
            if start < positions.stop and not (window and end <= positions.start + 1 - window):
                hidden = hidden_keys(positions, range(start, end), window, query.device)
                state.add(wide[:, block.start : block.stop], keys, values, hidden)
    return torch.cat([state.result() for state in running], dim=1).to(query.dtype)


@dataclass
class _Running:
    """A softmax and its weighted sum over the tiles so far, of some rows.

    Args:
        largest, total: float32 [heads, R, 1], the largest score and the sum of e^(score - largest).
        sums: float32 [heads, R, V], the sum of values by these; None: no tile yet.
    """

    largest: torch.Tensor
    total: torch.Tensor
    sums: torch.Tensor | None = None

    @classmethod
    def of(cls, heads: int, rows: int, sinks: torch.Tensor | None, device: torch.device) -> _Running:
        """Before the first tile: nothing, or the sinks' scores."""
        if sinks is None:
            shape = heads, rows, 1
            return cls(torch.full(shape, _LOWEST, device=device), torch.zeros(shape, device=device))
        largest = sinks.float()[:, None, None].repeat(1, rows, 1)
        return cls(largest, torch.ones_like(largest))

    def add(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Adds a tile: query [heads, R, D] by keys [kv_heads, n, D], of which `hidden` [R, n] are not seen."""
        heads, rows, dim = query.shape
        kv_heads = len(keys)
        # The heads of a group are rows of one product: as a batch each would get its own copy of the keys.
        scores = (query.reshape(kv_heads, -1, dim) @ keys.mT).view(heads, rows, -1)
        scores.masked_fill_(hidden, -torch.inf)
        largest = torch.maximum(self.largest, scores.amax(-1, keepdim=True))
        weights = scores.sub_(largest).exp_()
        factor = (self.largest - largest).exp_()
        summed = (weights.view(kv_heads, -1, weights.shape[2]) @ values).view(heads, rows, -1)
        self.total = self.total * factor + weights.sum(-1, keepdim=True)
        self.sums = summed if self.sums is None else self.sums * factor + summed
        self.largest = largest

    def result(self) -> torch.Tensor:
        """float32 [heads, R, V]."""
        assert self.sums is not None
        return self.sums / self.total


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
    for (sequence, row, rows), prompt, place in zip(kv.spans, kv.prompts, kv.places, strict=True):
        span = slice(row, row + rows)
        with threads.for_product(query.shape[1] * query.shape[3] * rows * (sequence.length + rows)):
            queries, read = _visible(module, sequence, query[0, :, span], key[0, :, span], value[0, :, span])
            tokens, quantized = sequence.length + rows, sequence.shape.format.quantized
            if s_aux is None and not quantized:
                summed = attend(queries, *read(0, tokens), scaling, window)
            else:
                summed = attend_tiles(queries, read, tokens, scaling, window, s_aux)
            out[:, span] = _values_of(module, sequence, summed) if _reads_latents(sequence) else summed
            if kv.signal:
                layer: Any = module.layer_idx
                skipped = first_counted(kv.signal, place.part, place.rows)
                keys = partial(_keys_of, read)
                received = attention_received(queries, keys, tokens, scaling, window, skipped, s_aux)
                kv.receive(place, prompt, layer, received, window)
    return out.transpose(0, 1).unsqueeze(0), None


def _keys_of(read: Read, first: int, end: int) -> torch.Tensor:
    return read(first, end)[0]


def _reads_latents(sequence: SequenceKV) -> bool:
    """Whether queries attend to latents: in a sequence's first step the module has expanded the keys and values."""
    return bool(sequence.shape.latent and sequence.length)


def _visible(
    module: Any, sequence: SequenceKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, Read]:
    """Returns a sequence's queries, and what reads keys and values, the earlier steps' included, in the same form."""
    if sequence.shape.latent and not _reads_latents(sequence):
        return query, lambda first, end: (key[:, first:end], value[:, first:end])
    if sequence.shape.latent:
        query = LatentHeads(module).query(query)
    return rotate(query, sequence.shape.rotation), partial(sequence.read, module.layer_idx)


def _values_of(module: Any, sequence: SequenceKV, summed: torch.Tensor) -> torch.Tensor:
    """Returns the sums of values [heads, R, value] of sums of stored latents [heads, R, latent]."""
    return LatentHeads(module).value(rotate(summed, sequence.shape.rotation).to(torch.bfloat16))


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
