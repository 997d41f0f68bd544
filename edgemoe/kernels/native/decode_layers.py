"""New tokens through decoder layers in one call of csrc/decode_layers.c, as far as their experts are resident."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.kernels.compensators import Compensators
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.attention import LayerKV
from edgemoe.kernels.native.decoder_parts import (
    NativeDecoderLayer,
    NativeOuterLayers,
    dense_layer,
    level_rule,
    next_routers,
    outer_layers,
)
from edgemoe.kernels.native.experts import NativeExpertKernel
from edgemoe.kernels.native.structures import (
    AttentionKV,
    DecoderLayer,
    DenseLayer,
    Expert,
    ExpertWorkspace,
    LevelRule,
    RemappingRule,
)
from edgemoe.kv.sequence import SequenceKV
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.levels import DecodeRule
from edgemoe.policy.remapping import Remapping

CHOSEN, WANTED, COMPUTED, PREDICTED = range(4)
"""Rows of a layer's trace (NativeDecodeLayers.trace)."""


class NativeDecodeLayers:
    """All layers of a model, for one token of each of some sequences, a row each.

    Args:
        outer: around the decoder layers.
        layers: at least one; all with attention of one shape and experts of one geometry.
        kernel: computes their experts.
        rows: most sequences of a call.
    """

    def __init__(
        self,
        outer: NativeOuterLayers,
        layers: Sequence[NativeDecoderLayer],
        kernel: NativeExpertKernel,
        rows: int = 1,
    ) -> None:
        # All attributes of this object keep the addresses in the structures valid.
        self._parts, self._layers, self._outer = outer, layers, outer_layers(outer)
        self._logits = outer.norm[0].new_empty(rows, outer.head[0].shape[0])
        hidden = layers[0].input_norm[0].numel()
        self.following = next_routers(layers)
        """For each layer with a router, the next one; 0 for the last one and for other layers."""
        slots = max((layer.router.top_k for layer in layers if layer.router), default=1)
        self.most_rows = rows
        self.trace = torch.zeros(len(layers), 4, rows, slots, dtype=torch.int64)
        """int64 [layers, 4, rows, k], of the last call, which has the first rows: experts chosen, levels wanted and
        computed, experts predicted."""
        self.normed = layers[0].qkv[0].new_empty(rows, hidden, dtype=torch.bfloat16)
        """bf16 [rows, H]: the input of the block at which the last call stopped."""
        self.gates = torch.zeros(len(layers), rows, slots)
        """float32 [layers, rows, k]: gate weights of the chosen experts."""
        self.remapped = torch.zeros(len(layers), 2, dtype=torch.int64)
        """int64 [layers, 2], of the last call: distinct experts before tokens agreed, and (token, slot) pairs that are
        others since; 0 where tokens choose by themselves."""
        most = max((layer.resident.experts for layer in layers if layer.resident), default=0)
        self._buffers = ExpertBuffers(kernel, self.normed, slots, most)
        self._workspace = self._buffers.structure
        self._fill_structures(most)
        self._stored = WeakKeyDictionary[SequenceKV, AttentionKV]()
        """The structure of a layer of each sequence; a call sets the layer and the length."""

    def _fill_structures(self, experts: int) -> None:
        """Makes the layers' structures, and the scratch that all layers share; experts: most of a layer."""
        widest = max(layer.qkv[0].shape[0] + layer.out[0].shape[1] for layer in self._layers)
        self._scratch = self.normed.new_empty(self.most_rows * widest)
        self._router_logits = self.normed.new_empty(self.most_rows * experts)
        count = len(self._layers)
        self._rules = (LevelRule * count)()
        self._dense = (DenseLayer * count)(*map(dense_layer, self._layers))
        self._structures = (DecoderLayer * count)(*(self._structure(i) for i in range(count)))

    def _structure(self, index: int) -> DecoderLayer:
        layer = self._layers[index]
        router, trace = layer.router, self.trace[index]
        return DecoderLayer(
            dense=ctypes.addressof(self._dense[index]),
            window=layer.window,
            following=self.following[index] - index if self.following[index] else 0,
            experts=layer.resident.experts if layer.resident else 0,
            slots=trace.shape[2],
            scratch_size=self._scratch.numel(),
            scratch=self._scratch.data_ptr(),
            normed=self.normed.data_ptr(),
            router=router.address if router else None,
            logits=self._router_logits.data_ptr(),
            probabilities=router.probabilities.data_ptr() if router else None,
            gates=self.gates[index].data_ptr(),
            chosen=trace[CHOSEN].data_ptr(),
            levels=ctypes.addressof(self._rules[index]),
            resident=layer.resident.address(index) if layer.resident else None,
            wanted=trace[WANTED].data_ptr(),
            computed=trace[COMPUTED].data_ptr(),
            predicted=trace[PREDICTED].data_ptr(),
            remapped=self.remapped[index].data_ptr(),
        )

    def configure(
        self,
        rules: Sequence[DecodeRule],
        remapping: Remapping | None,
        compensation: tuple[Compensation, Compensators] | None,
        *,
        exact: bool,
        renormalise: bool,
    ) -> None:
        """Sets the rules of the calls that follow: levels, agreement on experts, and which are compensated.

        Args:
            rules: one rule for each layer, which chooses levels.
            remapping: how the tokens of a call agree on experts; None: each has its own choice.
            compensation: the places of a token's experts that are compensated, and with what; None: no expert is.
            exact: compute at the wanted level even where more planes are resident.
            renormalise: scale gate weights to their sum before experts were skipped.
        """
        self._decode_rules = list(rules)  # keeps the tables that the structures point to
        self._rules[:] = [*map(level_rule, rules)]
        self._workspace.exact, self._workspace.renormalise = exact, renormalise
        self._compensators = compensation[1] if compensation else None  # keeps the addresses valid
        for i, structure in enumerate(self._structures):
            structure.compensators = self._compensators.table(i) if self._compensators else None
        if compensation:
            chosen, compensators = compensation
            workspace = self._workspace
            workspace.compensated_first, workspace.compensated_end = chosen.first, chosen.end
            workspace.compensated_level = compensators.level
        self._buffers.remap(remapping)

    def count_into(
        self, counts: npt.NDArray[np.float64] | None, mass: npt.NDArray[np.float64] | None
    ) -> None:
        """Has the calls that follow add every token's choice to counts, and its gate weights to mass.

        Args:
            counts, mass: [layers, experts], contiguous; None: nothing is counted.
        """
        self._counted = counts, mass  # keeps the addresses valid
        for i, layer in enumerate(self._layers):
            into = self._structures[i]
            into.chosen_by = into.chosen_mass = None
            if layer.router and counts is not None and mass is not None:
                into.chosen_by, into.chosen_mass = counts[i].ctypes.data, mass[i].ctypes.data

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """The embeddings of tokens, bf16 [1, rows, H].

        Raises:
            IndexError: no token of the vocabulary.
        """
        hidden = self.normed.new_empty(1, len(tokens), self.normed.shape[1])
        for row, token in zip(hidden[0], tokens, strict=True):
            if not 0 <= token < len(self._parts.table):
                raise IndexError(f"expected a token below {len(self._parts.table)}, got {token}")
            result = native.library().edgemoe_embed(
                ctypes.byref(self._outer), token, row.data_ptr(), row.numel()
            )
            if result:
                raise native.failure(result, "an embedding")
        return hidden

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of bf16 hidden [1, rows, H], contiguous: float32 [rows, vocab].

        Raises:
            MemoryError: no memory for activations.
        """
        result = native.library().edgemoe_head(
            *(native.threads(), ctypes.byref(self._outer), hidden.data_ptr(), hidden.shape[1]),
            *(self.normed.data_ptr(), hidden.shape[2], self._logits.data_ptr(), self._logits.shape[1]),
        )
        if result:
            raise native.failure(result, "the head's activations")
        return self._logits[: hidden.shape[1]].float()

    def run(
        self,
        layers: range,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        sequences: Sequence[SequenceKV],
        look_ahead: int,
    ) -> int:
        """Takes one token of each sequence through layers, as far as their experts are resident.

        Args:
            layers: which.
            hidden: bf16 [1, rows, H], contiguous; changed in place.
            rotation: cosine and sine of each token's position, bf16 [1, rows, dim] each, contiguous.
            sequences: the sequence that each row belongs to.
            look_ahead: level at which the next layer's predicted experts must be resident; 0: no prediction.

        Returns:
            the layer whose block is still to be added to hidden, from `normed`, as its router chose; or `layers`' end.

        Raises:
            MemoryError: no memory for activations or scores.
            ValueError: sizes of layers, hidden, rotation and KV that contradict each other.
        """
        first, rows, (cosine, sine) = layers.start, len(sequences), rotation
        if not hidden.shape[:-1] == cosine.shape[:-1] == sine.shape[:-1] == (1, rows):
            raise ValueError(f"expected one row for each of {rows} sequences, got {[*hidden.shape]}")
        kv = (AttentionKV * rows)()
        for row, each in enumerate(sequences):
            stored, (keys, values) = self._stored.get(each) or self._store(each), each.slices[first]
            stored.keys, stored.values, stored.past = keys.data_ptr(), values.data_ptr(), each.length
            kv[row] = stored
        done: int = native.library().edgemoe_decode_layers(
            *(native.threads(), ctypes.byref(self._structures, first * ctypes.sizeof(DecoderLayer))),
            *(len(layers), kv, rows, ctypes.byref(self._workspace), look_ahead),
            *(hidden.data_ptr(), hidden.shape[2], cosine.data_ptr(), sine.data_ptr(), cosine.shape[2]),
        )
        if done < 0:
            raise native.failure(done, "a new token's activations")
        return first + done

    def _store(self, sequence: SequenceKV) -> AttentionKV:
        """Makes the structure of a sequence's first layer, and keeps it for as long as the sequence lives."""
        stored = self._stored[sequence] = self._layers[0].attention.structure(
            LayerKV(*sequence.slices[0], sequence.length, sequence.shape.format)
        )
        return stored


class ExpertBuffers:
    """The memory in which one call computes the experts of a layer, and its structure.

    Args:
        kernel: Kernel of the experts.
        normed: bf16 [rows, H], input of a layer's block; gives the most rows of a call.
        slots: Experts of a token.
        experts: Most experts of a layer.

    Attributes:
        structure: Valid as long as this object.
    """

    def __init__(self, kernel: NativeExpertKernel, normed: torch.Tensor, slots: int, experts: int) -> None:
        (rows, hidden), pairs = normed.shape, len(normed) * slots
        self._rows, self._kept = normed.new_empty(pairs, hidden), torch.zeros(pairs)
        self._gathered = normed.new_empty(pairs if rows > 1 else 0, hidden)
        self._row_of, self._after = torch.zeros(2, pairs, dtype=torch.int64)
        self._first, self._together = torch.zeros(experts, dtype=torch.int64), (Expert * pairs)()
        self._popularity = torch.zeros(experts, dtype=torch.int64)
        self._remapping = RemappingRule(popularity=self._popularity.data_ptr())
        up, down, inner = kernel.matrices()
        self.structure = ExpertWorkspace(
            up=up,
            down=down,
            inner=inner,
            most_rows=rows,
            slots=slots,
            experts=experts,
            together=ctypes.addressof(self._together),
            gathered=self._gathered.data_ptr(),
            rows=self._rows.data_ptr(),
            gates=self._kept.data_ptr(),
            row_of=self._row_of.data_ptr(),
            after=self._after.data_ptr(),
            first=self._first.data_ptr(),
        )

    def remap(self, remapping: Remapping | None) -> None:
        """Sets how the tokens of the calls that follow agree on experts; None: each has its own choice."""
        if remapping:
            self._remapping.alpha, self._remapping.bins = remapping.alpha, remapping.bins
        self.structure.remapping = ctypes.addressof(self._remapping) if remapping else None
