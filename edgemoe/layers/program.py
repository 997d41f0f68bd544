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
from edgemoe.kernels.native.expert_activation import NativeExpertActivation
from edgemoe.kernels.native.functions import values_of
from edgemoe.kernels.program import (
    HIDDEN,
    NORMED,
    Activate,
    Add,
    Apply,
    Call,
    Experts,
    LayerProgram,
    Linear,
    Multiply,
    Norm,
    Operation,
    Scale,
)
from edgemoe.layers.called import call_block, call_indexed, call_parallel, call_states
from edgemoe.layers.decoder_parts import (
    LayerPart,
    Mixer,
    ParallelExperts,
    multiplier_of,
    outer_parts,
    parts_of,
)
from edgemoe.layers.dense import DenseEmbedding, DenseLinear, DenseNorm
from edgemoe.layers.gated_mlp import GatedMLP, PlainMLP
from edgemoe.layers.gating import gate_tables
from edgemoe.layers.linear_attention import PerSequence
from edgemoe.layers.router import CompiledRouter, router_of

DenseBlock = GatedMLP | PlainMLP

_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
"""Names of a block's experts that every token has."""

_KNOWN = {*_SHARED, "gate", "router", "experts", "shared_expert_gate"}
"""Names of the parts of a block whose sum is known: routed experts, and shared ones, perhaps scaled."""


def has_program(model: Any) -> bool:
    """Whether embedding, norms, attention and head of a model have native forms; blocks need none."""
    outer = outer_parts(model)
    dense = tuple(map(type, outer[:3])) == (DenseEmbedding, DenseNorm, DenseLinear)
    return dense and all(_fits(layer) for layer in model.model.layers)


def _fits(layer: Any) -> bool:
    parts = parts_of(layer)
    before = all(type(part.norm) in (DenseNorm, nn.Identity) for part in parts)
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


def outer_layers(model: Any) -> NativeOuterLayers:
    """The embedding, the last norm and the head of a model as the kernel takes them."""
    outer = outer_parts(model)
    table, weights = outer.embedding, (outer.norm.weight.data, outer.norm.variance_epsilon)
    numbers = outer.factor, outer.divisor, outer.cap, outer.multiplier, outer.wide_cap
    return NativeOuterLayers(table.weight.data, table.scale, weights, outer.head.parts, *numbers)


def experts_of(layer: Any) -> ExpertLayer | None:
    """The experts of a layer that has any."""
    found = (_experts(part.block) for part in parts_of(layer))
    return next((experts for experts in found if experts is not None), None)


def _experts(block: nn.Module) -> ExpertLayer | None:
    experts: ExpertLayer | None = getattr(getattr(block, "experts", None), "edgemoe", None)
    return experts


def layer_program(layer: Any, window: int, positions: Any = None) -> LayerProgram:
    """The list of a layer that `has_program` has found to have one.

    Args:
        layer: transformers' decoder layer, with this program's attention and norms.
        window: latest tokens that a row sees; 0: all.
        positions: the model's rotary embedding, for attention that is called as a module.
    """
    parts = parts_of(layer)
    hidden = next(norm.weight.shape[-1] for part in parts for norm in part[::-1] if type(norm) is DenseNorm)
    operations, norm = list[Operation](), None
    for part in parts:
        if part.norm is not norm:
            operations += [_before(part.norm)]
        operations += _part(part, hidden, positions)
        norm = part.norm
    if (factor := multiplier_of(layer)) != 1:
        operations.append(Multiply(HIDDEN, HIDDEN, factor))
    return LayerProgram(tuple(operations), window)


def _before(norm: nn.Module) -> Operation:
    """The operation that writes the input of a part."""
    if isinstance(norm, DenseNorm):
        return _norm(norm, HIDDEN, NORMED)
    return Apply(HIDDEN, NORMED, values_of(_same))


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _part(part: LayerPart, hidden: int, positions: Any) -> list[Operation]:
    """The operations that add a part of a layer to the state, of `hidden` numbers, once its input is in NORMED."""
    if part.parallel:
        return _dense_and_experts(part, part.parallel)
    if not part.mixes:
        return _block(part, hidden)
    mixer = _mixer(part)
    if mixer is None:
        states = isinstance(part.module, PerSequence)
        called = (
            partial(call_states, part.module) if states else partial(call_indexed, part.module, positions)
        )
        return [Call(NORMED, "block", called, hidden), *_added(part)]
    return [*mixer.operations(), Linear("attended", "block", mixer.out.parts), *_added(part)]


def _added(part: LayerPart) -> list[Operation]:
    """The operations that add a part's result to the state."""
    after: list[Operation] = [] if part.after is None else [_norm(part.after, "block", "block")]
    scaled = [] if part.residual == 1 else [Multiply(HIDDEN, HIDDEN, part.residual)]
    return [*after, *scaled, Add("block", HIDDEN, part.factor)]


def _norm(norm: DenseNorm, source: str, target: str) -> Norm:
    return Norm(source, target, norm.weight.data, norm.variance_epsilon)


def _block(part: LayerPart, hidden: int) -> list[Operation]:
    """The operations that add a layer's block to the state."""
    block = part.module
    if isinstance(block, DenseBlock):
        return [*_dense(block, "block"), *_added(part)]
    experts = _experts(block)
    own = {name: each for name, each in block.named_children() if not isinstance(each, nn.Identity)}
    inside = next((own[name] for name in _SHARED if name in own), None)
    shared = inside if part.shared is None else part.shared
    known = own.keys() <= _KNOWN and isinstance(shared, DenseBlock | None) and None in (inside, part.shared)
    router = router_of(block) if experts else None
    fuses, activation = _activation(block, experts)
    if not (known and experts and fuses and isinstance(router, CompiledRouter)):
        return [Call(NORMED, "block", partial(call_block, block, part.shared), hidden), *_added(part)]
    if shared is None and not part.factor and part.after is None and not _multiplied(block):
        return [Experts(HIDDEN, router.native, activation)]
    scaled: list[Operation] = []
    if "shared_expert_gate" in own:
        gate = Linear(NORMED, "shared_gate", block.shared_expert_gate.parts)
        scaled = [gate, Scale("shared_gate", "shared", values_of(torch.sigmoid))]
    added = [*_dense(shared, "shared"), *scaled, Add("shared", "block")] if shared is not None else []
    if added and getattr(block, "shared_expert_combination_strategy", "sum") == "average":
        part = part._replace(factor=0.5)
    return [Experts("block", router.native, activation), *_multiplied(block), *added, *_added(part)]


def _multiplied(block: Any) -> list[Operation]:
    """The product of the routed experts' sum with a block's own factor, where it has one."""
    factor = float(getattr(block, "routed_scaling_factor", 1))
    return [] if factor == 1 else [Multiply("block", "block", factor)]


def _dense_and_experts(part: LayerPart, parallel: ParallelExperts) -> list[Operation]:
    """The operations that add a dense block, and the experts parallel to it, to the state."""
    hidden, router = part.norm.weight.numel(), router_of(parallel.block)
    fuses, activation = _activation(parallel.block, _experts(parallel.block))
    called = Call(NORMED, "block", partial(call_block, part.module, None), hidden)
    dense = _dense(part.module, "block") if isinstance(part.module, DenseBlock) else [called]
    if fuses and isinstance(router, CompiledRouter):
        normed = _norm(parallel.norm, HIDDEN, NORMED)
        experts: list[Operation] = [normed, Experts("routed", router.native, activation, routed=HIDDEN)]
    else:
        experts = [Call(HIDDEN, "routed", partial(call_parallel, parallel), hidden)]
    summed = [_norm(parallel.after, "routed", "routed"), Add("routed", "block")]
    return [*dense, _norm(parallel.after_dense, "block", "block"), *experts, *summed, *_added(part)]


def _activation(block: Any, experts: ExpertLayer | None) -> tuple[bool, NativeExpertActivation | None]:
    """Whether the kernel computes what lies between the products of a block's experts, and what that is."""
    if experts is None or experts.fuses:
        return experts is not None, None
    tables = gate_tables(block.experts)
    return tables is not None, NativeExpertActivation(tables, experts.biases) if tables else None


def _dense(module: GatedMLP | PlainMLP, output: str) -> list[Operation]:
    if isinstance(module, PlainMLP):
        applied = Apply("up", "inner", values_of(module.function))
        above: list[Operation] = [Linear(NORMED, "up", module.up.parts), applied]
    else:
        gate_up = Linear(NORMED, "gate_up", module.gate_up.parts)
        above = [gate_up, Activate("gate_up", "inner", module.values)]
    return [*above, Linear("inner", output, module.down.parts)]
