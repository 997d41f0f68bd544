"""Attention over the preallocated KV, registered with transformers under the name `edgemoe`.

Each sequence of a step attends to its own keys. Positions give the causal structure, so a layer gets its window instead
of a mask; the model's own code chooses the window. A feature that is not implemented is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from edgemoe.errors import ModelRefused
from edgemoe.kernels import threads
from edgemoe.kv.rows import rotate
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import StepKV
from edgemoe.layers.attend import Read, attend, attend_tiles
from edgemoe.layers.mla import LatentHeads
from edgemoe.policy.importance import attention_received, first_counted

NAME = "edgemoe"

_UNSUPPORTED = ("softcap", "position_bias")


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
    _refuse_unsupported(module, kwargs)
    window = None if attention_mask is None else int(attention_mask)
    out = value.new_empty(query.shape[1], query.shape[2], value.shape[3])
    for index, (sequence, row, rows) in enumerate(kv.spans):
        span = slice(row, row + rows)
        with threads.for_product(query.shape[1] * query.shape[3] * rows * (sequence.length + rows)):
            parts = query[0, :, span], key[0, :, span], value[0, :, span]
            out[:, span] = _sequence_rows(module, kv, index, parts, (scaling, window, s_aux))
    return out.transpose(0, 1).unsqueeze(0), None


def _refuse_unsupported(module: torch.nn.Module, given: Mapping[str, Any]) -> None:
    """Refuses a value for a feature that is not implemented.

    Raises:
        ModelRefused: naming the feature and the module.
    """
    for name in _UNSUPPORTED:
        if given.get(name) is not None:
            raise ModelRefused(
                f"attention without {name} in {type(module).__name__}",
                f"a value for {name}",
                f"choose a model without {name}",
            )


def _sequence_rows(
    module: Any,
    kv: StepKV,
    index: int,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    how: tuple[float, int | None, torch.Tensor | None],
) -> torch.Tensor:
    """Computes the rows of one sequence of a step, and the attention that its tokens receive.

    Args:
        module: Attention module.
        kv: State of the step.
        index: Place of the sequence in the step.
        parts: Queries [heads, R, D], and keys and values [kv_heads, R, D or V], of the sequence's rows.
        how: Factor of the scores, window and sinks, as in attend_tiles.

    Returns:
        [heads, R, V].
    """
    sequence, (scaling, window, sinks) = kv.spans[index][0], how
    queries, read = _visible(module, sequence, *parts)
    summed = _summed(sequence, queries, read, scaling, window, sinks)
    if kv.signal:
        place, tokens = kv.places[index], sequence.length + queries.shape[1]
        skipped = first_counted(kv.signal, place.part, place.rows)
        keys = partial(_keys_of, read)
        received = attention_received(queries, keys, tokens, scaling, window, skipped, sinks)
        kv.receive(place, kv.prompts[index], module.layer_idx, received, window)
    return _values_of(module, sequence, summed) if _reads_latents(sequence) else summed


def _summed(
    sequence: SequenceKV,
    queries: torch.Tensor,
    read: Read,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The weighted sums of a sequence's values, [heads, R, V]; by tiles where scores have sinks or KV has codes."""
    tokens = sequence.length + queries.shape[1]
    if sinks is None and not sequence.shape.format.quantized:
        return attend(queries, *read(0, tokens), scaling, window)
    return attend_tiles(queries, read, tokens, scaling, window, sinks)


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
