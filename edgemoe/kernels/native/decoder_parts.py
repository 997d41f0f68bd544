"""The parts of a model that csrc/decode_layers.c goes through, as its structures."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edgemoe.kernels import program as listed
from edgemoe.kernels.list_widths import with_widths
from edgemoe.kernels.native.dense_weight import bits_of_weight, dense_weight
from edgemoe.kernels.native.norms import form_of
from edgemoe.kernels.native.structures import Buffer, LevelRule, Linear, Operation, OuterLayers
from edgemoe.kernels.program import HIDDEN, NORMED, LayerProgram, Weights
from edgemoe.policy.levels import DecodeRule

_KINDS: tuple[type, ...] = (
    *(listed.Norm, listed.Linear, listed.Attend, listed.Activate),
    *(listed.Scale, listed.Add, listed.Experts, listed.Call, listed.DeltaNet),
    *(listed.ShortConv, listed.StateSpace, listed.Apply),
    *(listed.StoreLatents, listed.LatentQueries, listed.LatentValues),
    listed.Multiply,
    listed.Place,
)
"""In the order of the kinds of csrc/operations.h."""


@dataclass(frozen=True)
class NativeOuterLayers:
    """The parts of a model around its decoder layers.

    Args:
        table: embeddings [vocab, H]: bf16, int8 with the scales, or of 4 to 6 bits (storage.store.dense_groups).
        row_scale: bf16 [vocab]; None: the table is not int8.
        norm: weight, as kernels.program.Norm has it, and epsilon of the norm before the head.
        head: linear layer [vocab, H].
        factor: is multiplied with embeddings.
        divisor: logits are divided by it, in bf16.
        cap: logits become cap tanh(logits / cap), in bf16 or with wide_cap in float32; 0: they stay.
        multiplier: logits are multiplied with it, in bf16.
    """

    table: torch.Tensor
    row_scale: torch.Tensor | None
    norm: tuple[torch.Tensor, float]
    head: Weights
    factor: float = 1.0
    divisor: float = 1.0
    cap: float = 0.0
    multiplier: float = 1.0
    wide_cap: bool = False


def outer_layers(parts: NativeOuterLayers) -> OuterLayers:
    """The structure of the parts around the decoder layers, which they must outlive."""
    return OuterLayers(
        table=parts.table.data_ptr(),
        row_scale=None if parts.row_scale is None else parts.row_scale.data_ptr(),
        rows=len(parts.table),
        bits=bits_of_weight(parts.table),
        norm=parts.norm[0].data_ptr(),
        epsilon=parts.norm[1],
        wide=form_of(parts.norm[0]),
        head=linear(parts.head),
    )


def next_routers(programs: Sequence[LayerProgram]) -> list[int]:
    """Returns, for each layer with a router, the next layer with one; 0 for the last one and for other layers."""
    routed = [i for i, program in enumerate(programs) if program.router]
    return [next((j for j in routed if j > i), 0) if i in routed else 0 for i in range(len(programs))]


def level_rule(rule: DecodeRule) -> LevelRule:
    """The structure of a rule, which must outlive it with its tables."""
    tables = {"damage": rule.damage, "price": rule.price, "held": rule.places}
    structure = LevelRule(
        rule=rule.kind,
        count=len(rule.levels),
        experts=0 if rule.damage is None else len(rule.damage),
        **{name: table.data_ptr() for name, table in tables.items() if table is not None},
    )
    structure.level[: len(rule.levels)] = rule.levels
    structure.counts[: len(rule.counts)] = rule.counts
    return structure


def linear(weights: Weights) -> Linear:
    """The structure of a linear layer, which its tensors must outlive."""
    weight, scale, bias = weights
    return Linear(weight=dense_weight(weight, scale), bias=None if bias is None else bias.data_ptr())


class ListBuffers:
    """The buffers of the lists of all layers: memory for the rows of a call, and its structures.

    Args:
        programs: the lists.
        hidden: numbers of a state.
        rows: most rows of a call.

    Attributes:
        tensors: name -> bf16 [rows, numbers of the widest row]; without HIDDEN, which each call brings.
        structures: a structure for each buffer; HIDDEN's is the first, NORMED's the second.
    """

    def __init__(self, programs: Sequence[LayerProgram], hidden: int, rows: int) -> None:
        self._hidden, most = hidden, {HIDDEN: hidden, NORMED: hidden}
        for program in programs:
            for each, _, writes in with_widths(program, hidden):
                most[each.output] = max(most.get(each.output, 0), writes)
        self._index = {name: i for i, name in enumerate(most)}
        del most[HIDDEN]
        self.tensors = {name: torch.zeros(rows, width, dtype=torch.bfloat16) for name, width in most.items()}
        self.structures = (Buffer * len(self._index))(
            Buffer(), *(Buffer(at=each.data_ptr(), size=each.numel()) for each in self.tensors.values())
        )

    def rows_of(self, name: str, rows: int, cols: int) -> torch.Tensor:
        """The rows [1, rows, cols] that an operation has left in a buffer other than HIDDEN, or is to find there."""
        return self.tensors[name].view(-1)[: rows * cols].view(1, rows, cols)

    def operations(self, program: LayerProgram) -> tuple[Any, list[Any]]:
        """The structures of a list, and what they point to, which must outlive them."""
        kept, made = list[Any](), list[Operation]()
        for each, reads, writes in with_widths(program, self._hidden):
            structure = Operation(
                kind=_KINDS.index(type(each)),
                input=self._index[each.input],
                output=self._index[each.output],
                input_cols=reads,
                output_cols=writes,
                parameters=_parameters(each, kept),
                number=_number(each),
                routed=self._index[each.routed] if isinstance(each, listed.Experts) else 0,
                rotation=each.rotation if isinstance(each, listed.Attend | listed.Multiply) else 0,
                wide=_form(each),
            )
            made.append(structure)
        return (Operation * len(made))(*made), kept


def _form(each: listed.Operation) -> int:
    """The form of a norm; whether the table of an activation or a scale is float32, and whether rows have factors."""
    match each:
        case listed.Norm():
            return form_of(each.weight)
        case listed.Activate() | listed.Scale():
            return each.values.dtype == torch.float32
        case listed.Multiply():
            return each.factor is None
        case _:
            return 0


def _number(each: listed.Operation) -> float:
    """The number of an operation that has one."""
    match each:
        case listed.Norm():
            return each.epsilon
        case listed.Add() | listed.Multiply():
            return each.factor or 0.0
        case listed.Place():
            return float(each.at)
        case _:
            return 0.0


def _parameters(each: listed.Operation, references: list[Any]) -> int | None:
    """The address of an operation's parameters, which stay in place while the objects in `references` live."""
    references.append(each)
    match each:
        case listed.Norm():
            return each.weight.data_ptr()
        case listed.Linear():
            references.append(linear(each.weights))
            return ctypes.addressof(references[-1])
        case listed.Attend():
            return each.attention.address
        case listed.DeltaNet():
            return each.net.address
        case listed.ShortConv():
            return each.conv.address
        case listed.StateSpace():
            return each.space.address
        case listed.StoreLatents() | listed.LatentQueries() | listed.LatentValues():
            return each.latents.address
        case listed.Activate() | listed.Apply() | listed.Scale():
            return each.values.data_ptr()
        case _:
            return None
