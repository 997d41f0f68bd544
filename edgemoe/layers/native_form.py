"""A model's modules in the form in which the compiled kernel decodes with them."""

from __future__ import annotations

from typing import Any

from torch import nn

from edgemoe.experts.layer import ExpertLayer
from edgemoe.kernels.native.decoder_parts import NativeDecoderLayer, NativeOuterLayers
from edgemoe.kernels.native.experts import ResidentTable
from edgemoe.layers.dense import DenseEmbedding, DenseLinear, DenseNorm
from edgemoe.layers.gqa import GroupedQueryAttention
from edgemoe.layers.router import SoftmaxRouter


def has_native_form(model: Any) -> bool:
    """Whether embedding, layers, norm and head of a model have native forms, blocks other than experts left out."""
    outer = model.model.embed_tokens, model.model.norm, model.lm_head
    dense = tuple(map(type, outer)) == (DenseEmbedding, DenseNorm, DenseLinear)
    return dense and outer[0].factor is None and all(_fits(layer) for layer in model.model.layers)


def outer_layers(model: Any) -> NativeOuterLayers:
    """The embedding, the last norm and the head of a model as the kernel takes them."""
    table, norm, head = model.model.embed_tokens, model.model.norm, model.lm_head
    return NativeOuterLayers(
        *(table.weight.data, table.scale, (norm.weight.data, norm.variance_epsilon)),
        (head.weight.data, head.scale, head.bias),
    )


def experts_of(block: nn.Module) -> ExpertLayer | None:
    """The experts of a block that has any."""
    experts: ExpertLayer | None = getattr(getattr(block, "experts", None), "edgemoe", None)
    return experts


def _fits(layer: Any) -> bool:
    """Whether attention, norms and router of a layer have native forms."""
    parts: list[tuple[nn.Module, type]] = [(layer.self_attn, GroupedQueryAttention)]
    parts += [(norm, DenseNorm) for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    parts += [(layer.mlp.gate, SoftmaxRouter)] if experts_of(layer.mlp) else []
    return all(isinstance(part, kind) for part, kind in parts)


def native_layer(layer: Any, window: int, table: ResidentTable | None) -> NativeDecoderLayer:
    """A decoder layer as the kernel takes it.

    Args:
        layer: the layer, whose parts have native forms.
        window: latest tokens that a row sees; 0: all.
        table: the resident experts, where the layer's block is routed experts; None: another block.
    """
    attention: GroupedQueryAttention = layer.self_attn
    qkv, out = ((linear.weight.data, linear.scale, linear.bias) for linear in (attention.qkv, attention.out))
    before, after = (
        (norm.weight.data, norm.variance_epsilon)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    )
    router = layer.mlp.gate.native if table else None
    return NativeDecoderLayer(attention.native, window, before, after, qkv, out, router, table)
