"""A decoder layer's list of operations (kernels.program), made of transformers' modules.

The list of a Qwen3-MoE layer, where [N] are numbers of a row:

    Norm      hidden [H]            -> normed [H]
    Linear    normed [H]            -> qkv [(heads + 2 kv_heads) D]
    Attend    qkv                   -> attended [heads D]
    Linear    attended              -> block [H]
    Add       block                 -> hidden
    Norm      hidden                -> normed
    Experts   normed                -> hidden, added

GLM-4.5 has shared experts as well: its Experts write to `block`, and then follow

    Linear    normed                -> gate_up [2 S]
    Activate  gate_up               -> inner [S]
    Linear    inner                 -> shared [H]
    Add       shared                -> block
    Add       block                 -> hidden

Qwen3-Next's attention has a gate, before its last product:

    Linear    normed                -> gate [heads D]
    Scale     gate                  -> attended

Its linear attention has, in place of the first two products and of Attend between them,

    Linear    normed                -> projected [channels + value_heads (V + 2)]
    DeltaNet  projected             -> attended [value_heads V]
    Linear    attended              -> block [H]

Kimi Delta Attention (Kimi-Linear, Ling 3.0) has more products, whose results are parts of one row: of queries, keys and
values together, of the gate, of rates and of decays, each

    Linear    normed                -> part [N]
    Place     part                  -> projected

A gated short convolution (LFM2) has between them

    Linear    normed                -> projected [3 H]
    ShortConv projected             -> attended [H]

A selective state space (Mamba-2: Nemotron-H, Granite 4) has between them

    Linear     normed               -> projected [values + channels + heads]
    StateSpace projected            -> attended [values]

Multi-head latent attention (DeepSeek, GLM-4.7-Flash) has between them

    Linear         normed           -> queries [heads (key + rotary)]
    Linear         normed           -> compressed [latent + rotary]
    StoreLatents   compressed       -> the sequence's KV
    LatentQueries  queries          -> as_keys [heads (latent + rotary)]
    Attend         as_keys          -> summed [heads (latent + rotary)]
    LatentValues   summed           -> attended [heads value]

Ling 3.0 has a gate for each head before the last product, as Qwen3-Next has one for each number.

Gemma 4 has experts parallel to a dense block, whose router reads the state itself. After the block's first norm:

    Linear    normed                -> gate_up [2 S]
    Activate  gate_up               -> inner [S]
    Linear    inner                 -> block [H]
    Norm      block                 -> block
    Norm      hidden                -> normed
    Experts   normed                -> routed [H], chosen from hidden
    Norm      routed                -> routed
    Add       routed                -> block
    Norm      block                 -> block
    Add       block                 -> hidden
    Multiply  hidden                -> hidden

A.X-K2 gates the results of its norms, by two products of low rank:

    Norm      hidden                -> normed
    Linear    normed                -> low
    Apply     low                   -> low
    Linear    low                   -> norm_gate [H]
    Scale     norm_gate             -> normed

FlexOlmo has no norms before its parts: Apply copies the state. Command A+ has one norm for both parts, whose result the
second one finds where the first one has found it.

Nemotron-H's layers are one of these parts each; its experts, and what every token has, have no gate: Apply instead of
Activate. Granite multiplies a part's result, with a factor of its Add.

What is no kind of operation is a Call of its module, and what surrounds it stays fused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from edgemoe.experts.layer import ExpertLayer
from edgemoe.kernels.native.decoder_parts import NativeOuterLayers
from edgemoe.kernels.native.functions import values_of
from edgemoe.kernels.program import (
    HIDDEN,
    NORMED,
    Apply,
    Call,
    LayerProgram,
    Linear,
    Multiply,
    Operation,
)
from edgemoe.layers.block_program import added, block_operations, experts_in, norm_operation
from edgemoe.layers.called import call_indexed, call_states
from edgemoe.layers.decoder_parts import LayerPart, Mixer, multiplier_of, outer_parts, parts_of
from edgemoe.layers.dense import DenseLinear, DenseNorm
from edgemoe.layers.embedding import DenseEmbedding
from edgemoe.layers.gated_norm import GatedNorm
from edgemoe.layers.linear_attention import PerSequence


def has_program(model: Any) -> bool:
    """Whether embedding, norms, attention and head of a model have native forms; blocks need none."""
    outer = outer_parts(model)
    dense = tuple(map(type, outer[:3])) == (DenseEmbedding, DenseNorm, DenseLinear)
    return dense and all(_fits(layer) for layer in model.model.layers)


def _fits(layer: Any) -> bool:
    parts = parts_of(layer)
    before = all(type(part.norm) in (DenseNorm, GatedNorm, nn.Identity) for part in parts)
    norms = [norm for part in parts if part.parallel for norm in part.parallel[1:]]
    norms += [part.after for part in parts if part.after is not None]
    known = before and all(type(norm) is DenseNorm for norm in norms)
    return known and all(_mixer(part) or _called(part) for part in parts if part.mixes)


def _mixer(part: LayerPart) -> Mixer | None:
    """The computation of a layer's attention or other part that knows earlier tokens; None: it has no native form."""
    own = part.module.module if isinstance(part.module, PerSequence) else part.module
    return own if isinstance(own, Mixer) else None


def _called(part: LayerPart) -> bool:
    """Whether a part is called as a module, and what surrounds it stays in the list: a state, or an index of tokens."""
    return isinstance(part.module, PerSequence) or hasattr(part.module, "indexer")


def calls_states(model: Any) -> bool:
    """Whether a part with a state for each sequence is called as a module, which has no rows to keep of guesses."""
    parts = (part for layer in model.model.layers for part in parts_of(layer) if part.mixes)
    return any(isinstance(part.module, PerSequence) and _mixer(part) is None for part in parts)


def outer_layers(model: Any) -> NativeOuterLayers:
    """The embedding, the last norm and the head of a model as the kernel takes them."""
    outer = outer_parts(model)
    table, weights = outer.embedding, (outer.norm.weight.data, outer.norm.variance_epsilon)
    numbers = outer.factor, outer.divisor, outer.cap, outer.multiplier, outer.wide_cap
    return NativeOuterLayers(table.weight.data, table.scale, weights, outer.head.parts, *numbers)


def experts_of(layer: Any) -> ExpertLayer | None:
    """The experts of a layer that has any."""
    found = (experts_in(part.block) for part in parts_of(layer))
    return next((experts for experts in found if experts is not None), None)


def layer_program(layer: Any, window: int, positions: Any = None) -> LayerProgram:
    """The list of a layer that `has_program` has found to have one.

    Args:
        layer: transformers' decoder layer, with this program's attention and norms.
        window: latest tokens that a row sees; 0: all.
        positions: the model's rotary embedding, for attention that is called as a module.
    """
    parts = parts_of(layer)
    norms = (norm for part in parts for norm in (part.norm, part.after))
    hidden = next(norm.weight.shape[-1] for norm in norms if isinstance(norm, DenseNorm | GatedNorm))
    operations, norm = list[Operation](), None
    for part in parts:
        if part.norm is not norm:
            operations += _before(part.norm)
        operations += _part(part, hidden, positions)
        norm = part.norm
    if (factor := multiplier_of(layer)) != 1:
        operations.append(Multiply(HIDDEN, HIDDEN, factor))
    return LayerProgram(tuple(operations), window)


def _before(norm: nn.Module) -> list[Operation]:
    """The operations that write the input of a part."""
    if isinstance(norm, GatedNorm):
        return norm.operations(HIDDEN, NORMED)
    if isinstance(norm, DenseNorm):
        return [norm_operation(norm, HIDDEN, NORMED)]
    return [Apply(HIDDEN, NORMED, values_of(_same))]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _part(part: LayerPart, hidden: int, positions: Any) -> list[Operation]:
    """The operations that add a part of a layer to the state, of `hidden` numbers, once its input is in NORMED."""
    if not part.mixes:
        return block_operations(part, hidden)
    mixer = _mixer(part)
    if mixer is None:
        states = isinstance(part.module, PerSequence)
        called = (
            partial(call_states, part.module) if states else partial(call_indexed, part.module, positions)
        )
        return [Call(NORMED, "block", called, hidden), *added(part)]
    return [*mixer.operations(), Linear("attended", "block", mixer.out.parts), *added(part)]
