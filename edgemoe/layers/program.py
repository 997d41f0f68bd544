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

Multi-head latent attention (DeepSeek, GLM-4.7-Flash) has between them

    Linear         normed           -> queries [heads (key + rotary)]
    Linear         normed           -> compressed [latent + rotary]
    StoreLatents   compressed       -> the sequence's KV
    LatentQueries  queries          -> as_keys [heads (latent + rotary)]
    Attend         as_keys          -> summed [heads (latent + rotary)]
    LatentValues   summed           -> attended [heads value]

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
    Attend,
    Call,
    DeltaNet,
    Experts,
    LayerProgram,
    Linear,
    Norm,
    Operation,
    Scale,
)
from edgemoe.layers.delta_net import GatedDeltaNet
from edgemoe.layers.dense import DenseEmbedding, DenseLinear, DenseNorm
from edgemoe.layers.gated_mlp import GatedMLP
from edgemoe.layers.gating import gate_tables
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.layers.latent_list import LatentList
from edgemoe.layers.linear_attention import PerSequence
from edgemoe.layers.router import CompiledRouter, router_of

_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
"""Names of a block's experts that every token has."""

_KNOWN = {*_SHARED, "gate", "router", "experts", "shared_expert_gate"}
"""Names of the parts of a block whose sum is known: routed experts, and shared ones, perhaps scaled."""


def has_program(model: Any) -> bool:
    """Whether embedding, norms, attention and head of a model have native forms; blocks need none."""
    outer = model.model.embed_tokens, model.model.norm, model.lm_head
    dense = tuple(map(type, outer)) == (DenseEmbedding, DenseNorm, DenseLinear)
    return dense and outer[0].factor is None and all(_fits(layer) for layer in model.model.layers)


def _fits(layer: Any) -> bool:
    norms = layer.input_layernorm, layer.post_attention_layernorm
    return _mixer(layer) is not None and all(type(norm) is DenseNorm for norm in norms)


def _mixer(layer: Any) -> GroupedQueryAttention | GatedDeltaNet | LatentList | None:
    """The attention of a layer, or its gated delta net; None: it has another one."""
    found = getattr(layer, "self_attn", None) or getattr(layer, "linear_attn", None)
    own = found.module if isinstance(found, PerSequence) else found
    if isinstance(own, GroupedQueryAttention | GatedDeltaNet):
        return own
    return LatentList.try_from(own)


def outer_layers(model: Any) -> NativeOuterLayers:
    """The embedding, the last norm and the head of a model as the kernel takes them."""
    table, norm, head = model.model.embed_tokens, model.model.norm, model.lm_head
    weights = (norm.weight.data, norm.variance_epsilon)
    return NativeOuterLayers(table.weight.data, table.scale, weights, head.parts)


def experts_of(block: nn.Module) -> ExpertLayer | None:
    """The experts of a block that has any."""
    experts: ExpertLayer | None = getattr(getattr(block, "experts", None), "edgemoe", None)
    return experts


def layer_program(layer: Any, window: int) -> LayerProgram:
    """The list of a layer that `has_program` has found to have one.

    Args:
        layer: transformers' decoder layer, with this program's attention and norms.
        window: latest tokens that a row sees; 0: all.
    """
    mixer = _mixer(layer)
    assert mixer
    operations: list[Operation] = [
        _norm(layer.input_layernorm),
        *_mixing(mixer),
        Linear("attended", "block", mixer.out.parts),
        Add("block", HIDDEN),
        _norm(layer.post_attention_layernorm),
        *_block(layer.mlp, layer.input_layernorm.weight.numel()),
    ]
    return LayerProgram(tuple(operations), window)


def _mixing(mixer: GroupedQueryAttention | GatedDeltaNet | LatentList) -> list[Operation]:
    if isinstance(mixer, LatentList):
        return mixer.operations()
    return _delta_net(mixer) if isinstance(mixer, GatedDeltaNet) else _attention(mixer)


def _attention(attention: GroupedQueryAttention) -> list[Operation]:
    gated: list[Operation] = []
    if attention.gate is not None:
        gate = Linear(NORMED, "gate", attention.gate.parts)
        gated = [gate, Scale("gate", "attended", values_of(torch.sigmoid))]
    qkv = Linear(NORMED, "qkv", attention.qkv.parts)
    return [qkv, Attend("qkv", "attended", attention.native), *gated]


def _delta_net(net: GatedDeltaNet) -> list[Operation]:
    projected = Linear(NORMED, "projected", net.projected.parts)
    return [projected, DeltaNet("projected", "attended", net.native)]


def _norm(norm: DenseNorm) -> Norm:
    return Norm(HIDDEN, NORMED, norm.weight.data, norm.variance_epsilon)


def _block(block: Any, hidden: int) -> list[Operation]:
    """What adds a layer's block to the state of `hidden` numbers."""
    if isinstance(block, GatedMLP):
        return [*_gated(block, "block"), Add("block", HIDDEN)]
    experts, parts = experts_of(block), {name for name, _ in block.named_children()}
    shared = next((getattr(block, name) for name in _SHARED if name in parts), None)
    known = parts <= _KNOWN and isinstance(shared, GatedMLP | None)
    router = router_of(block) if experts else None
    fuses, activation = _activation(block, experts)
    if not (known and experts and fuses and isinstance(router, CompiledRouter)):
        return [Call(NORMED, "block", partial(_call, block), hidden), Add("block", HIDDEN)]
    if shared is None:
        return [Experts(HIDDEN, router.native, activation)]
    scaled: list[Operation] = []
    if "shared_expert_gate" in parts:
        gate = Linear(NORMED, "shared_gate", block.shared_expert_gate.parts)
        scaled = [gate, Scale("shared_gate", "shared", values_of(torch.sigmoid))]
    return [
        Experts("block", router.native, activation),
        *_gated(shared, "shared"),
        *scaled,
        Add("shared", "block"),
        Add("block", HIDDEN),
    ]


def _activation(block: Any, experts: ExpertLayer | None) -> tuple[bool, NativeExpertActivation | None]:
    """Whether the kernel computes what lies between the products of a block's experts, and what that is."""
    if experts is None or experts.fuses:
        return experts is not None, None
    tables = gate_tables(block.experts)
    return tables is not None, NativeExpertActivation(tables, experts.biases) if tables else None


def _gated(module: GatedMLP, output: str) -> list[Operation]:
    return [
        Linear(NORMED, "gate_up", module.gate_up.parts),
        Activate("gate_up", "inner", values_of(module.function)),
        Linear("inner", output, module.down.parts),
    ]


def _call(module: nn.Module, step: Any, x: torch.Tensor) -> torch.Tensor:
    found = module(x)
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out
