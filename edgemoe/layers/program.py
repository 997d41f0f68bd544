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
    Activate,
    Add,
    Attend,
    Call,
    Experts,
    LayerProgram,
    Linear,
    Norm,
    Operation,
    Scale,
    Weights,
)
from edgemoe.layers.dense import DenseEmbedding, DenseLinear, DenseNorm
from edgemoe.layers.gated_mlp import GatedMLP
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.layers.router import CompiledRouter

_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
"""Names of a block's experts that every token has."""

_KNOWN = {*_SHARED, "gate", "experts", "shared_expert_gate"}
"""Names of the parts of a block whose sum is known: routed experts, and shared ones, perhaps scaled."""


def has_program(model: Any) -> bool:
    """Whether embedding, norms, attention and head of a model have native forms; blocks need none."""
    outer = model.model.embed_tokens, model.model.norm, model.lm_head
    dense = tuple(map(type, outer)) == (DenseEmbedding, DenseNorm, DenseLinear)
    return dense and outer[0].factor is None and all(_fits(layer) for layer in model.model.layers)


def _fits(layer: Any) -> bool:
    norms = layer.input_layernorm, layer.post_attention_layernorm
    return isinstance(layer.self_attn, GroupedQueryAttention) and all(
        type(norm) is DenseNorm for norm in norms
    )


def outer_layers(model: Any) -> NativeOuterLayers:
    """The embedding, the last norm and the head of a model as the kernel takes them."""
    table, norm, head = model.model.embed_tokens, model.model.norm, model.lm_head
    weights = (norm.weight.data, norm.variance_epsilon)
    return NativeOuterLayers(table.weight.data, table.scale, weights, weights_of(head))


def experts_of(block: nn.Module) -> ExpertLayer | None:
    """The experts of a block that has any."""
    experts: ExpertLayer | None = getattr(getattr(block, "experts", None), "edgemoe", None)
    return experts


def weights_of(linear: DenseLinear) -> Weights:
    """A linear layer's tensors."""
    return linear.weight.data, linear.scale, linear.bias


def layer_program(layer: Any, window: int, slot: int) -> LayerProgram:
    """The list of a layer that `has_program` has found to have one.

    Args:
        layer: transformers' decoder layer, with this program's attention and norms.
        window: latest tokens that a row sees; 0: all.
        slot: the place of its keys and values.
    """
    attention: GroupedQueryAttention = layer.self_attn
    operations: list[Operation] = [
        _norm(layer.input_layernorm),
        Linear(NORMED, "qkv", weights_of(attention.qkv)),
        Attend("qkv", "attended", attention.native),
        Linear("attended", "block", weights_of(attention.out)),
        Add("block", HIDDEN),
        _norm(layer.post_attention_layernorm),
        *_block(layer.mlp, layer.input_layernorm.weight.numel()),
    ]
    return LayerProgram(tuple(operations), window, slot)


def _norm(norm: DenseNorm) -> Norm:
    return Norm(HIDDEN, NORMED, norm.weight.data, norm.variance_epsilon)


def _block(block: Any, hidden: int) -> list[Operation]:
    """What adds a layer's block to the state of `hidden` numbers."""
    if isinstance(block, GatedMLP):
        return [*_gated(block, "block"), Add("block", HIDDEN)]
    experts, parts = experts_of(block), {name for name, _ in block.named_children()}
    shared = next((getattr(block, name) for name in _SHARED if name in parts), None)
    known = parts <= _KNOWN and isinstance(shared, GatedMLP | None)
    if not (known and experts and experts.fuses and isinstance(block.gate, CompiledRouter)):
        return [Call(NORMED, "block", partial(_call, block), hidden), Add("block", HIDDEN)]
    if shared is None:
        return [Experts(HIDDEN, block.gate.native)]
    scaled: list[Operation] = []
    if "shared_expert_gate" in parts:
        gate = Linear(NORMED, "shared_gate", weights_of(block.shared_expert_gate))
        scaled = [gate, Scale("shared_gate", "shared", values_of(torch.sigmoid))]
    return [
        Experts("block", block.gate.native),
        *_gated(shared, "shared"),
        *scaled,
        Add("shared", "block"),
        Add("block", HIDDEN),
    ]


def _gated(module: GatedMLP, output: str) -> list[Operation]:
    return [
        Linear(NORMED, "gate_up", weights_of(module.gate_up)),
        Activate("gate_up", "inner", values_of(module.function)),
        Linear("inner", output, weights_of(module.down)),
    ]


def _call(module: nn.Module, step: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = module(x)
    return out
