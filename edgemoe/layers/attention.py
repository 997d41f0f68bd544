"""Attention over the preallocated KV, registered with transformers under the name `edgemoe`.

Each sequence of a step attends to its own keys. Positions give the causal structure, so a layer gets its window instead
of a mask; the model's own code chooses the window. An argument that is not known here may change the result, so it is
refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from edgemoe.errors import ModelRefused
from edgemoe.kernels import torch_rules
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.attention import StoredAttention, kernel_fits
from edgemoe.kv.rows import rotate
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.step import StepKV
from edgemoe.layers.attend import Read, attend, attend_tiles
from edgemoe.layers.gqa import layer_kv, sums_of
from edgemoe.layers.graph.static_kv import StaticKV
from edgemoe.layers.indexed import Compute, chosen_tokens
from edgemoe.layers.mla import LatentHeads
from edgemoe.policy.importance import attention_received, first_counted

NAME = "edgemoe"

_WITHOUT_EFFECT = frozenset(
    {"dropout", "sliding_window", "position_ids", "use_cache"}
    | {"output_attentions", "output_hidden_states", "output_router_logits", "return_dict"}
)
"""Arguments that change nothing here: dropout is for training, positions give the causal structure, and some models
pass their window to layers whose mask has none.
"""


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    kv: StepKV | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes a layer's attention for all sequences of a step, or launches it: transformers' attention interface.

    Args:
        module: the layer's attention module.
        query, key, value: [1, heads, rows, D], and twice [1, kv_heads, rows, D or V], of the step's rows.
        attention_mask, scaling, s_aux: the window (window_of_mask), the scores' factor, and [heads], sinks' scores.
        kv: the step's state, with the keys and values of this step; its `ranks` are set where it has a `signal`.
        indices: int [1, rows, K], the tokens that each row attends to, of layers.indexed; None: all.
        kwargs: arguments without effect or that are None are ignored; `is_causal` must be true.

    Returns:
        [1, rows, heads, V], contiguous, and no attention weights.

    Raises:
        ModelRefused: the model passes an argument that is not known here, or a picture attends in both directions.
    """
    assert kv is not None
    _refuse_unknown(module, kwargs)
    out, how = [], (scaling, (window := window_of(attention_mask)), s_aux)
    if isinstance(kv, StaticKV):
        return kv.attend(module, query, how), None
    _refuse_both_ways(module, kv, window)
    for index, (sequence, row, rows) in enumerate(kv.spans):
        sequence.pass_window(module.layer_idx, window, rows)
        queries, keys, values = (each[0, :, row : row + rows] for each in (query, key, value))
        out.append(_compute(query, indices)(module, kv, index, (queries, keys, values), how))
    whole = torch.cat(out, dim=1) if len(out) > 1 else out[0]  # float32 where stored keys are rotated
    return whole.to(query.dtype).transpose(0, 1).contiguous().unsqueeze(0), None


def _refuse_both_ways(module: torch.nn.Module, kv: StepKV, window: int | None) -> None:
    """Refuses a step whose pictures attend in both directions: layers.gqa alone computes that.

    Raises:
        ModelRefused: naming the module.
    """
    if window and kv.ahead is not None:
        wanted = (
            f"the compiled kernel in {type(module).__name__}, for pictures that attend in both directions"
        )
        raise ModelRefused(wanted, "heads of a size that it does not take", "send text")


def window_of(mask: torch.Tensor | None) -> int | None:
    """The window that window_of_mask gave a layer; None: each row attends to all rows before it."""
    return None if mask is None else int(mask) or None


def _compute(query: torch.Tensor, indices: torch.Tensor | None) -> Compute:
    """The function that computes the rows of one sequence."""
    compute: Compute = _rows_alike if _by_kernel(query) else _sequence_rows
    return compute if indices is None else partial(chosen_tokens, compute, indices[0])


def _by_kernel(query: torch.Tensor) -> bool:
    """Whether rows are computed so that no bit depends on their number."""
    return native.available() and query.device.type == "cpu"


def _refuse_unknown(module: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuses every argument that this attention does not compute with, unless it is None or has no effect.

    Raises:
        ModelRefused: naming the argument and the module.
    """
    for name, value in arguments.items():
        if value is not None and name not in _WITHOUT_EFFECT and not (name == "is_causal" and value):
            raise ModelRefused(
                f"attention of queries, keys, values, a window and sinks alone in {type(module).__name__}",
                f"the argument {name}, which edgemoe does not compute with",
                "choose a model of another family",
            )


def _rows_alike(
    module: Any,
    kv: StepKV,
    index: int,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    how: tuple[float, int | None, torch.Tensor | None],
) -> torch.Tensor:
    """Computes `_sequence_rows` so that no row's bits depend on which rows share the step.

    The compiled kernel does so, with the keys and values that the sequence has; with latents the module has `latents`
    (mla.use_compiled_latents). Heads of sizes that it does not take are computed row by row.
    """
    sequence, (scaling, window, sinks) = kv.spans[index][0], how
    layer, own = module.layer_idx, parts[2].shape[2]
    shape = sequence.shapes[layer]
    queries: torch.Tensor = module.latents.query(parts[0]) if shape.latent else parts[0]
    heads, rows, dim = queries.shape
    if kernel_fits(heads, shape.heads, dim):
        received = sums_of(kv, index)
        compiled = StoredAttention(heads, shape.heads, dim, scaling, sinks)
        summed = compiled(queries, layer_kv(sequence, layer), window, received)
        if received:
            kv.receive(kv.places[index], kv.prompts[index], layer, received.sums, window)
    else:
        read, queries = partial(sequence.read, layer), rotate(queries, shape.rotation)
        ends = range(sequence.length + 1, sequence.length + rows + 1)
        alone = zip(queries.split(1, dim=1), ends, strict=True)
        summed = torch.cat(
            [attend_tiles(row, read, end, scaling, window, sinks) for row, end in alone], dim=1
        )
        _receive(module, kv, index, queries, read, how)
    if shape.latent:
        latents = rotate(summed[..., : shape.latent], shape.rotation).to(torch.bfloat16)
        values: torch.Tensor = module.latents.value(latents)
        return values
    return summed[..., :own]


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
    heads, rows, dim = queries.shape
    with torch_rules.threads_for(heads * dim * rows * (sequence.length + rows)):
        summed = _summed(sequence, queries, read, scaling, window, sinks)
    _receive(module, kv, index, queries, read, how)
    if _reads_latents(module, sequence):
        return _values_of(module, sequence, summed)
    return summed[..., : parts[2].shape[2]]


def _receive(
    module: Any,
    kv: StepKV,
    index: int,
    queries: torch.Tensor,
    read: Read,
    how: tuple[float, int | None, torch.Tensor | None],
) -> None:
    """Counts the attention that the tokens of a sequence receive, where the step counts it; arguments as above."""
    if not kv.signal:
        return
    (scaling, window, sinks), place = how, kv.places[index]
    tokens = kv.spans[index][0].length + queries.shape[1]
    skipped = first_counted(kv.signal, place.part, place.rows)
    received = attention_received(queries, partial(_keys_of, read), tokens, scaling, window, skipped, sinks)
    kv.receive(place, kv.prompts[index], module.layer_idx, received, window)


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
        first = max(sequence.length + 1 - window, 0) if window else 0
        return attend(queries, *read(first, tokens), scaling, window)
    return attend_tiles(queries, read, tokens, scaling, window, sinks)


def _keys_of(read: Read, first: int, end: int) -> torch.Tensor:
    return read(first, end)[0]


def _reads_latents(module: Any, sequence: SequenceKV) -> bool:
    """Whether queries attend to latents: in a sequence's first step the module has expanded the keys and values."""
    return bool(sequence.shapes[module.layer_idx].latent and sequence.length)


def _visible(
    module: Any, sequence: SequenceKV, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, Read]:
    """Returns a sequence's queries, and what reads keys and values, the earlier steps' included, in the same form."""
    shape = sequence.shapes[module.layer_idx]
    if shape.latent and not _reads_latents(module, sequence):
        return query, lambda first, end: (key[:, first:end], value[:, first:end])
    if shape.latent:
        query = LatentHeads(module).query(query)
    return rotate(query, shape.rotation), partial(sequence.read, module.layer_idx)


def _values_of(module: Any, sequence: SequenceKV, summed: torch.Tensor) -> torch.Tensor:
    """Returns the sums of values [heads, R, value] of sums of stored latents [heads, R, latent]."""
    rotation = sequence.shapes[module.layer_idx].rotation
    return LatentHeads(module).value(rotate(summed, rotation).to(torch.bfloat16))


def window_of_mask(
    *, allow_is_causal_skip: bool = True, local_size: int | None = None, **kwargs: Any
) -> torch.Tensor | None:
    """Returns a layer's window, int64 []; None where each row attends to all rows before it.

    Implements transformers' mask interface. A model that computes with the causal mask itself gets one 0 in its place,
    int64 [1, 1, 1, 1]: layers.indexed makes its own.

    Raises:
        ModelRefused: the model needs a mask that is not causal.
    """
    if not allow_is_causal_skip and kwargs.get("mask_function") is causal_mask_function and not local_size:
        return torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    if not allow_is_causal_skip:
        raise ModelRefused(
            "causal attention", "a mask of the model's own", "choose a model with causal attention"
        )
    return torch.tensor(local_size) if local_size else None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, window_of_mask)
