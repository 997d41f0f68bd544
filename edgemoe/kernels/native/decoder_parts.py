"""The parts of a model that csrc/decode_layers.c goes through, and their structures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edgemoe.kernels.native.attention import NativeAttention
from edgemoe.kernels.native.experts import ResidentTable
from edgemoe.kernels.native.router import NativeRouter
from edgemoe.kernels.native.structures import DenseLayer, LevelRule, Linear, OuterLayers
from edgemoe.policy.levels import DecodeRule

Weights = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Weight, row scale and bias of a linear layer, as layers.dense.DenseLinear has them."""

Norm = tuple[torch.Tensor, float]
"""Weight, bf16 [H], and epsilon."""


@dataclass(frozen=True)
class NativeDecoderLayer:
    """The parts of one decoder layer.

    Args:
        attention: Attention of the layer.
        window: Latest tokens that attention sees; 0: all.
        input_norm, post_norm: Norms before and after attention.
        qkv, out: Projections before and after attention.
        router: None where the block after the second norm is more than routed experts, or no experts at all.
        resident: The layer's resident experts; None where there is no router.
    """

    attention: NativeAttention
    window: int
    input_norm: Norm
    post_norm: Norm
    qkv: Weights
    out: Weights
    router: NativeRouter | None
    resident: ResidentTable | None


@dataclass(frozen=True)
class NativeOuterLayers:
    """The parts of a model around its decoder layers.

    Args:
        table: Embeddings [vocab, H]: bf16, or int8 with the scales.
        row_scale: bf16 [vocab]; None: the table is bf16.
        norm: Norm before the head.
        head: Linear layer [vocab, H].
    """

    table: torch.Tensor
    row_scale: torch.Tensor | None
    norm: Norm
    head: Weights


def outer_layers(parts: NativeOuterLayers) -> OuterLayers:
    """The structure of the parts around the decoder layers, which they must outlive."""
    return OuterLayers(
        table=parts.table.data_ptr(),
        row_scale=None if parts.row_scale is None else parts.row_scale.data_ptr(),
        rows=len(parts.table),
        norm=parts.norm[0].data_ptr(),
        epsilon=parts.norm[1],
        head=linear(parts.head),
    )


def next_routers(layers: Sequence[NativeDecoderLayer]) -> list[int]:
    """For each layer with a router the next layer with one; 0 for the last one and for other layers."""
    routed = [i for i, layer in enumerate(layers) if layer.router]
    return [next((j for j in routed if j > i), 0) if i in routed else 0 for i in range(len(layers))]


def level_rule(rule: DecodeRule) -> LevelRule:
    """The structure of a rule, which must outlive it with its tables."""
    tables = {"damage": rule.damage, "price": rule.price, "held": rule.held}
    structure = LevelRule(
        rule=rule.kind,
        count=len(rule.levels),
        critical=rule.critical,
        experts=0 if rule.damage is None else len(rule.damage),
        **{name: table.data_ptr() for name, table in tables.items() if table is not None},
    )
    structure.level[: len(rule.levels)] = rule.levels
    return structure


def dense_layer(layer: NativeDecoderLayer) -> DenseLayer:
    """The structure of a layer's dense parts, which must outlive it."""
    return DenseLayer(
        attention=layer.attention.address,
        input_norm=layer.input_norm[0].data_ptr(),
        post_norm=layer.post_norm[0].data_ptr(),
        input_epsilon=layer.input_norm[1],
        post_epsilon=layer.post_norm[1],
        qkv=linear(layer.qkv),
        out=linear(layer.out),
    )


def linear(weights: Weights) -> Linear:
    """The structure of a linear layer, which its tensors must outlive."""
    weight, scale, bias = weights
    return Linear(
        weight=weight.data_ptr(),
        row_scale=None if scale is None else scale.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        rows=weight.shape[0],
        cols=weight.shape[1],
    )
