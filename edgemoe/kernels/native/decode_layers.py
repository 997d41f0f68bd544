"""New tokens through decoder layers in one call of csrc/decode_layers.c, as far as their experts are resident."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from edgemoe.kernels.compensators import Compensators
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.decoder_parts import (
    ListBuffers,
    NativeOuterLayers,
    level_rule,
    next_routers,
    outer_layers,
)
from edgemoe.kernels.native.expert_buffers import ExpertBuffers
from edgemoe.kernels.native.experts import NativeExpertKernel, ResidentTable
from edgemoe.kernels.native.sequence_memory import SequenceMemory
from edgemoe.kernels.native.structures import (
    Buffer,
    DecoderLayer,
    LevelRule,
    Rotation,
    SequenceKV,
)
from edgemoe.kernels.program import NORMED, LayerProgram
from edgemoe.kv import sequence as kv_sequence
from edgemoe.policy.compensation import Compensation
from edgemoe.policy.levels import DecodeRule
from edgemoe.policy.remapping import Remapping

CHOSEN, WANTED, COMPUTED, PREDICTED = range(4)
"""Rows of a layer's trace (NativeDecodeLayers.trace)."""


class Place(NamedTuple):
    """Where steps of new tokens are: before an operation of a layer's list."""

    layer: int
    operation: int


class StepRows(NamedTuple):
    """The structures of a step's rows.

    Attributes:
        kv: an array of SequenceKV, one for each row.
        rows: number of rows.
        rotations: an array of Rotation.
        kept: tensors whose addresses the structures have.
    """

    kv: Any
    rows: int
    rotations: Any
    kept: Any


class NativeDecodeLayers:
    """All layers of a model, for new tokens of some sequences, a row each.

    Args:
        outer: around the decoder layers.
        programs: a list for each layer, at least one; all with experts of one geometry.
        resident: the resident experts of all layers.
        kernel: computes them.
        rows: most tokens of a call.
    """

    def __init__(
        self,
        outer: NativeOuterLayers,
        programs: Sequence[LayerProgram],
        resident: ResidentTable,
        kernel: NativeExpertKernel,
        rows: int = 1,
    ) -> None:
        # All attributes of this object keep the addresses in the structures valid.
        self._parts, self.programs, self._outer = outer, programs, outer_layers(outer)
        self._resident, self.most_rows = resident, rows
        self._logits = torch.empty(rows, outer.head[0].shape[0], dtype=torch.bfloat16)
        self.following = next_routers(programs)
        """Number of the next layer with a router, for each layer with one; 0 for the last one and for other layers."""
        slots = max((program.router.top_k for program in programs if program.router), default=1)
        self.trace = torch.zeros(len(programs), 4, rows, slots, dtype=torch.int64)
        """int64 [layers, 4, rows, k], of the last call, which has the first rows: experts chosen, levels wanted and
        computed, experts predicted."""
        self.gates = torch.zeros(len(programs), rows, slots)
        """float32 [layers, rows, k]: gate weights of the chosen experts."""
        self.remapped = torch.zeros(len(programs), 2, dtype=torch.int64)
        """int64 [layers, 2], of the last call: distinct experts before tokens agreed, and (token, slot) pairs that are
        others since; 0 where tokens choose by themselves."""
        self.buffers = ListBuffers(programs, outer.norm[0].shape[-1], rows)
        self._buffers = ExpertBuffers(kernel, self.buffers.tensors[NORMED], slots, resident.experts)
        self._workspace = self._buffers.structure
        self._workspace.buffers = ctypes.addressof(self.buffers.structures)
        self._workspace.buffer_count = len(self.buffers.structures)
        self._fill_structures()
        self._sequences = SequenceMemory(programs)

    def _fill_structures(self) -> None:
        """Makes the layers' structures, and the scratch that all routers share."""
        self._router_logits = torch.empty(self.most_rows * self._resident.experts)
        count = len(self.programs)
        self._rules = (LevelRule * count)()
        self._lists = [self.buffers.operations(program) for program in self.programs]
        self._structures = (DecoderLayer * count)(*(self._structure(i) for i in range(count)))

    def _structure(self, index: int) -> DecoderLayer:
        program, (operations, _) = self.programs[index], self._lists[index]
        router, trace = program.router, self.trace[index]
        return DecoderLayer(
            operations=ctypes.addressof(operations),
            count=len(operations),
            window=program.window,
            following=self.following[index] - index if self.following[index] else 0,
            experts=self._resident.experts if router else 0,
            slots=trace.shape[2],
            router=router.address if router else None,
            logits=self._router_logits.data_ptr(),
            scores=router.scores.data_ptr() if router else None,
            gates=self.gates[index].data_ptr(),
            chosen=trace[CHOSEN].data_ptr(),
            levels=ctypes.addressof(self._rules[index]),
            resident=self._resident.address(index) if router else None,
            wanted=trace[WANTED].data_ptr(),
            computed=trace[COMPUTED].data_ptr(),
            predicted=trace[PREDICTED].data_ptr(),
            remapped=self.remapped[index].data_ptr(),
            activation=program.activation.address if program.activation else None,
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
        for i, program in enumerate(self.programs):
            into = self._structures[i]
            into.chosen_by = into.chosen_mass = None
            if program.router and counts is not None and mass is not None:
                into.chosen_by, into.chosen_mass = counts[i].ctypes.data, mass[i].ctypes.data

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """The embeddings of tokens, bf16 [1, rows, H].

        Raises:
            IndexError: no token of the vocabulary.
        """
        hidden = self._logits.new_empty(1, len(tokens), self._parts.norm[0].shape[-1])
        for row, token in zip(hidden[0], tokens, strict=True):
            if not 0 <= token < len(self._parts.table):
                raise IndexError(f"expected a token below {len(self._parts.table)}, got {token}")
            result = native.library().edgemoe_embed(
                ctypes.byref(self._outer), token, row.data_ptr(), row.numel()
            )
            if result:
                raise native.failure(result, "an embedding")
        return hidden if self._parts.factor == 1 else hidden.mul_(self._parts.factor)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of bf16 hidden [1, rows, H], contiguous: float32 [rows, vocab].

        Raises:
            MemoryError: no memory for activations.
        """
        result = native.library().edgemoe_head(
            *(native.threads(), ctypes.byref(self._outer), hidden.data_ptr(), hidden.shape[1]),
            *(
                self.buffers.tensors[NORMED].data_ptr(),
                hidden.shape[2],
                self._logits.data_ptr(),
                self._logits.shape[1],
            ),
        )
        if result:
            raise native.failure(result, "the head's activations")
        logits = self._logits[: hidden.shape[1]]
        logits = logits if self._parts.divisor == 1 else logits / self._parts.divisor
        logits = logits if self._parts.multiplier == 1 else logits * self._parts.multiplier
        cap = self._parts.cap
        logits = logits.float() if self._parts.wide_cap else logits
        return (torch.tanh(logits / cap) * cap if cap else logits).float()

    def begin(
        self,
        hidden: torch.Tensor,
        rotations: Sequence[tuple[torch.Tensor, torch.Tensor]],
        places: Sequence[tuple[kv_sequence.SequenceKV, int]],
    ) -> StepRows:
        """Makes the rows of a step, which the calls of `run` take.

        Consecutive tokens of one sequence may be rows of the same step: each layer stores all rows' keys and values
        before it attends, and takes the rows through a state one after another. The state after the step has the first
        of them alone.

        Args:
            hidden: bf16 [1, rows, H], contiguous; the calls change it in place.
            rotations: cosine and sine of each token's position, [1, rows, rotated] each, contiguous; bf16, or float32
                where attention computes with those.
            places: the sequence that each row belongs to, and the row's position in it.

        Raises:
            ValueError: the numbers of rows differ.
        """
        rows, tables = len(places), (Rotation * len(rotations))()
        for i, (cosine, sine) in enumerate(rotations):
            tables[i] = Rotation(cosine=cosine.data_ptr(), sine=sine.data_ptr(), cols=cosine.shape[2])
            if not cosine.shape[:-1] == sine.shape[:-1] == hidden.shape[:-1] == (1, rows):
                raise ValueError(f"expected a row for each of {rows} tokens, got {[*hidden.shape]}")
        kv = (SequenceKV * rows)()
        for row, (sequence, position) in enumerate(places):
            kv[row] = self._sequences.structure(sequence)
            kv[row].past, kv[row].guess = position, position - sequence.length
        self.buffers.structures[0] = Buffer(at=hidden.data_ptr(), size=hidden.numel())
        return StepRows(kv, rows, tables, (hidden, rotations))

    def run(self, step: StepRows, place: Place, end: int, look_ahead: int) -> Place:
        """Takes the rows through layers, as far as their experts are resident.

        Args:
            step: the rows, from `begin`.
            place: where to begin.
            end: the layer to end before.
            look_ahead: level at which the next layer's predicted experts must be resident; 0: no prediction.

        Returns:
            the operation that the caller is to compute: Experts, whose router has chosen, or a Call; or (end, 0).

        Raises:
            MemoryError: no memory for activations or scores.
            ValueError: sizes of layers, hidden, rotations and KV that contradict each other.
        """
        at = (ctypes.c_int64 * 2)(*place)
        result: int = native.library().edgemoe_decode_layers(
            *(native.threads(), self._structures, at, end, step.kv, step.rows),
            *(ctypes.byref(self._workspace), look_ahead, step.rotations),
        )
        if result:
            raise native.failure(result, "a new token's activations")
        return Place(at[0], at[1])

    def choices_of(
        self, layers: list[int], rows: int
    ) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the choices of some layers' routers in the latest step, in ExpertUse.add_damage's order.

        Args:
            layers: layers whose router is the kernel's.
            rows: rows of the step.

        Returns:
            the layer of each of len(layers) * rows rows, int64 [rows, k] experts, float32 [rows, k] gates, int64
            [rows, k] levels.
        """
        trace, gates = self.trace[layers][:, :, :rows], self.gates[layers][:, :rows]
        chosen, wanted = trace[:, CHOSEN].flatten(0, 1), trace[:, WANTED].flatten(0, 1)
        return [layer for layer in layers for _ in range(rows)], chosen, gates.flatten(0, 1), wanted
