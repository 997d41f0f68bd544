"""The keys and values and the states of sequences, as csrc/decode_layers.c reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from edgemoe.kernels.native.attention import NativeAttention, StoredAttention
from edgemoe.kernels.native.attention_rows import LayerKV
from edgemoe.kernels.native.structures import AttentionKV, DeltaCopies, SequenceKV
from edgemoe.kernels.program import Attend, LayerProgram
from edgemoe.kv import sequence as kv_sequence


class SequenceMemory:
    """The C structures of sequences; a sequence's structures of its layers are made once.

    Args:
        programs: the lists of all layers.
    """

    def __init__(self, programs: Sequence[LayerProgram]) -> None:
        self._attention = [_attention_of(program) for program in programs]
        self._stored = WeakKeyDictionary[kv_sequence.SequenceKV, Any]()
        """Where a sequence's keys lie, and a structure of keys and values and one of states for each layer."""

    def structure(self, sequence: kv_sequence.SequenceKV) -> SequenceKV:
        """The structure of a sequence as it is now; valid until its next step."""
        at, stored = sequence.keys.data_ptr(), self._stored.get(sequence)
        if stored is None or stored[0] != at:
            layers = range(len(self._attention))
            kv = (AttentionKV * len(layers))(*(self._keys_and_values(sequence, layer) for layer in layers))
            states = (DeltaCopies * len(layers))(*(_states(sequence, layer) for layer in layers))
            stored = self._stored[sequence] = at, kv, states
        return SequenceKV(
            kv=ctypes.addressof(stored[1]),
            states=ctypes.addressof(stored[2]),
            past=sequence.length,
            valid=sequence.states.valid if sequence.states else 0,
            earlier=sequence.states.accepted if sequence.states and sequence.length else 0,
        )

    def _keys_and_values(self, sequence: kv_sequence.SequenceKV, layer: int) -> AttentionKV:
        """The structure of a layer's keys and values; an empty one where its list has no attention."""
        attention = self._attention[layer]
        if attention is None:
            return AttentionKV()
        (keys, values), shape = sequence.slices[sequence.slots[layer]], sequence.shapes[layer]
        stored = keys if shape.latent else values
        return attention.structure(LayerKV(keys, stored, sequence.length, shape.format, shape.latent))


def _attention_of(program: LayerProgram) -> NativeAttention | StoredAttention | None:
    return next((each.attention for each in program.operations if isinstance(each, Attend)), None)


def _states(sequence: kv_sequence.SequenceKV, layer: int) -> DeltaCopies:
    """The structure of both copies of a layer's state; an empty one where it has none."""
    made = DeltaCopies()
    if sequence.states and sequence.states.has(layer):
        (conv, recurrent), guesses = sequence.states.copies(layer), sequence.states.guesses(layer)
        made.conv[:] = [each.data_ptr() for each in conv]
        made.state[:] = [each.data_ptr() for each in recurrent]
        made.kept[:] = [each.data_ptr() for each in guesses]
        made.space = guesses.shape[1]
    return made
