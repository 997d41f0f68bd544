"""One new token through decoder layers in one call of csrc/decode_layers.c, as far as its experts are resident."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.attention import NativeAttention
from edgemoe.kernels.native.experts import NativeExpertKernel, ResidentTable
from edgemoe.kernels.native.router import NativeRouter
from edgemoe.kernels.native.structures import (
    AttentionKV,
    DecoderLayer,
    DenseLayer,
    Expert,
    ExpertWorkspace,
    LevelRule,
    Linear,
    OuterLayers,
)
from edgemoe.policy.levels import DecodeRule

Weights = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Weight, row scale and bias of a linear layer, as layers.dense.DenseLinear has them."""

Norm = tuple[torch.Tensor, float]
"""Weight, bf16 [H], and epsilon."""

CHOSEN, WANTED, COMPUTED, PREDICTED = range(4)
"""Rows of a layer's trace (NativeDecodeLayers.trace)."""


@dataclass(frozen=True)
class NativeDecoderLayer:
    """The parts of one decoder layer.

    Args:
        attention: of the layer.
        window: latest tokens that attention sees; 0: all.
        input_norm, post_norm: norms before and after attention.
        qkv, out: projections before and after attention.
        router: None where the block behind the second norm is more than routed experts, or no experts at all.
        resident: the layer's resident experts; None where there is no router.
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
        table: embeddings [vocab, H]: bf16, or int8 with the scales.
        row_scale: bf16 [vocab]; None: the table is bf16.
        norm: before the head.
        head: [vocab, H].
    """

    table: torch.Tensor
    row_scale: torch.Tensor | None
    norm: Norm
    head: Weights


class NativeDecodeLayers:
    """All layers of a model, for single tokens.

    Args:
        outer: around the decoder layers.
        layers: at least one; all with attention of one shape and experts of one geometry.
        kernel: of their experts.
    """

    def __init__(
        self, outer: NativeOuterLayers, layers: Sequence[NativeDecoderLayer], kernel: NativeExpertKernel
    ) -> None:
        # All attributes of this object keep the addresses in the structures valid.
        self._parts, self._layers = outer, layers
        self._outer = OuterLayers(
            table=outer.table.data_ptr(),
            row_scale=None if outer.row_scale is None else outer.row_scale.data_ptr(),
            rows=len(outer.table),
            norm=outer.norm[0].data_ptr(),
            epsilon=outer.norm[1],
            head=_linear(outer.head),
        )
        self._logits = outer.norm[0].new_empty(1, outer.head[0].shape[0])
        hidden = layers[0].input_norm[0].numel()
        routed = [i for i, layer in enumerate(layers) if layer.router]
        self.following = [
            next((j for j in routed if j > i), 0) if i in routed else 0 for i in range(len(layers))
        ]
        """Of each layer with a router, the next one; 0 for the last one and for other layers."""
        slots = max((layer.router.top_k for layer in layers if layer.router), default=1)
        self.trace = torch.zeros(len(layers), 4, slots, dtype=torch.int64)
        """int64 [layers, 4, k], of the last token: experts chosen, levels wanted and computed, experts predicted."""
        self.normed = layers[0].qkv[0].new_empty(1, hidden, dtype=torch.bfloat16)
        """bf16 [1, H]: the input of the block at which the last call stopped."""
        self.gates = torch.zeros(len(layers), slots)
        """float32 [layers, k]: gate weights of the chosen experts."""
        widest = max(layer.qkv[0].shape[0] + layer.out[0].shape[1] for layer in layers)
        self._scratch = self.normed.new_empty(widest)
        self._rules = (LevelRule * len(layers))()
        self._dense = (DenseLayer * len(layers))(*map(_dense_layer, layers))
        self._structures = (DecoderLayer * len(layers))(*(self._structure(i) for i in range(len(layers))))
        self._rows, self._kept = self.normed.new_empty(slots, hidden), torch.zeros(slots)
        self._together = (Expert * slots)()
        up, down, inner = kernel.matrices()
        self._workspace = ExpertWorkspace(
            up=up,
            down=down,
            inner=inner,
            slots=slots,
            together=ctypes.addressof(self._together),
            rows=self._rows.data_ptr(),
            gates=self._kept.data_ptr(),
        )

    def _structure(self, index: int) -> DecoderLayer:
        layer = self._layers[index]
        router, trace = layer.router, self.trace[index]
        return DecoderLayer(
            dense=ctypes.addressof(self._dense[index]),
            window=layer.window,
            following=self.following[index] - index if self.following[index] else 0,
            experts=len(layer.resident) if layer.resident else 0,
            slots=trace.shape[1],
            scratch_size=self._scratch.numel(),
            scratch=self._scratch.data_ptr(),
            normed=self.normed.data_ptr(),
            router=router.address if router else None,
            logits=router.logits.data_ptr() if router else None,
            probabilities=router.probabilities.data_ptr() if router else None,
            gates=self.gates[index].data_ptr(),
            chosen=trace[CHOSEN].data_ptr(),
            levels=ctypes.addressof(self._rules[index]),
            resident=layer.resident.address if layer.resident else None,
            wanted=trace[WANTED].data_ptr(),
            computed=trace[COMPUTED].data_ptr(),
            predicted=trace[PREDICTED].data_ptr(),
        )

    def configure(self, rules: Sequence[DecodeRule], *, exact: bool, renormalise: bool) -> None:
        """Sets the rule of every layer's levels, for the calls that follow.

        Args:
            rules: one for each layer.
            exact: compute at the wanted level even where more planes are resident.
            renormalise: scale gate weights to their sum before experts were skipped.
        """
        self._decode_rules = list(rules)  # keeps the tables that the structures point to
        self._rules[:] = [*map(level_rule, rules)]
        self._workspace.exact, self._workspace.renormalise = exact, renormalise

    def embed(self, token: int) -> torch.Tensor:
        """The embedding of a token, bf16 [1, 1, H].

        Raises:
            IndexError: no token of the vocabulary.
        """
        if not 0 <= token < len(self._parts.table):
            raise IndexError(f"expected a token below {len(self._parts.table)}, got {token}")
        hidden = self.normed.new_empty(1, *self.normed.shape)
        result = native.library().edgemoe_embed(
            ctypes.byref(self._outer), token, hidden.data_ptr(), hidden.numel()
        )
        if result:
            raise native.failure(result, "an embedding")
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of bf16 hidden, H in all, contiguous: float32 [1, vocab].

        Raises:
            MemoryError: no memory for activations.
        """
        result = native.library().edgemoe_head(
            *(native.threads(), ctypes.byref(self._outer), hidden.data_ptr(), self.normed.data_ptr()),
            *(hidden.numel(), self._logits.data_ptr(), self._logits.numel()),
        )
        if result:
            raise native.failure(result, "the head's activations")
        return self._logits.float()

    def run(
        self,
        layers: range,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        past: int,
        look_ahead: int,
    ) -> int:
        """Takes a token through layers, as far as its experts are resident.

        Args:
            layers: which.
            hidden: bf16, H in all, contiguous; changed in place.
            rotation: cosine and sine of the token's position, bf16, a head's size each, contiguous.
            keys, values: of all layers, bf16 [layers, kv_heads, context, dim], contiguous.
            past: valid tokens in them.
            look_ahead: level at which the next layer's predicted experts must be resident; 0: no prediction.

        Returns:
            the layer whose block is still to be added to hidden, from `normed`, as its router chose if it has one;
            or the end of `layers`.

        Raises:
            MemoryError: no memory for activations or scores.
            ValueError: sizes of layers, hidden, rotation and KV that contradict each other.
        """
        first, size, attention = layers.start, ctypes.sizeof(DecoderLayer), self._layers[0].attention
        if keys.shape[1::2] != (attention.kv_heads, attention.dim) or values.shape != keys.shape:
            raise ValueError(
                f"expected KV of {attention.kv_heads} heads of {attention.dim}, got {keys.shape}"
            )
        kv = AttentionKV(
            keys=keys[first].data_ptr(), values=values[first].data_ptr(), context=keys.shape[2], past=past
        )
        done: int = native.library().edgemoe_decode_layers(
            *(native.threads(), ctypes.byref(self._structures, first * size)),
            *(len(layers), ctypes.byref(kv), ctypes.byref(self._workspace), look_ahead),
            *(hidden.data_ptr(), hidden.numel()),
            *(rotation[0].data_ptr(), rotation[1].data_ptr(), rotation[0].numel()),
        )
        if done < 0:
            raise native.failure(done, "a new token's activations")
        return first + done


def level_rule(rule: DecodeRule) -> LevelRule:
    """The structure of a rule, whose table the rule must outlive."""
    table = rule.damage
    structure = LevelRule(
        rule=rule.kind,
        count=len(rule.levels),
        critical=rule.critical,
        experts=0 if table is None else len(table),
        damage=None if table is None else table.data_ptr(),
    )
    structure.level[: len(rule.levels)] = rule.levels
    structure.price[: len(rule.price)] = rule.price
    return structure


def _dense_layer(layer: NativeDecoderLayer) -> DenseLayer:
    return DenseLayer(
        attention=layer.attention.address,
        input_norm=layer.input_norm[0].data_ptr(),
        post_norm=layer.post_norm[0].data_ptr(),
        input_epsilon=layer.input_norm[1],
        post_epsilon=layer.post_norm[1],
        qkv=_linear(layer.qkv),
        out=_linear(layer.out),
    )


def _linear(weights: Weights) -> Linear:
    weight, scale, bias = weights
    return Linear(
        weight=weight.data_ptr(),
        row_scale=None if scale is None else scale.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        rows=weight.shape[0],
        cols=weight.shape[1],
    )
