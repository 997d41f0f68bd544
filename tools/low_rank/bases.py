"""Bases of 2, 3 and 4 bits with low-rank compensators, on the matrices of one checkpoint.

Three kinds of base: codes of a group's range rounded to nearest, HQQ's, and levels 2 and 4 of a store. Compensators are
made as `edgemoe compensate` makes them, of every rank that the matrices allow, and belong to all experts or to the ones
at some places of a token's ranking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edgemoe.policy.bits import BITS_PER_WEIGHT
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.compensators.low_rank import dequantize3, factor, quantize3, refit
from edgemoe.storage.compensators.reference import stored_weights
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.reader import RecordReader
from tools.low_rank.quantizers import SCALES, half_quadratic, round_to_nearest

FACTOR_BITS = 3.25
"""Bits of a number of a compensator's factors, with its share of a scale."""

Weights = Callable[[ExpertKey, Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""(expert, its gate, up and down in float32) -> the three matrices as a base has them."""


@dataclass(frozen=True)
class Base:
    """A form of quantized weights.

    Args:
        name: its name in tables.
        bits: bits per weight, with scales.
        weights: the decoded matrices of an expert.
    """

    name: str
    bits: float
    weights: Weights


@contextmanager
def bases(store: Path | None) -> Iterator[list[Base]]:
    """Yields the bases; levels of a store only where one is given, which stays open inside the block."""
    kinds = (("rounded", round_to_nearest), ("HQQ", half_quadratic))
    quantized = [
        Base(f"{name} {bits}", bits + SCALES, partial(_each, how, bits))
        for name, how in kinds
        for bits in (2, 3)
    ]
    with ExitStack() as stack:
        levels: list[Base] = []
        if store:
            manifest = Manifest.load(store)
            reader = RecordReader.open(store, manifest)
            stack.callback(reader.close)
            levels = [
                Base(f"level {level}", BITS_PER_WEIGHT[level], partial(_stored, reader, manifest, level))
                for level in (2, 4)
            ]
        yield quantized + levels


def _each(
    how: Callable[[torch.Tensor, int], torch.Tensor],
    bits: int,
    key: ExpertKey,
    weights: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    return [how(weight, bits) for weight in weights]


def _stored(
    reader: RecordReader, manifest: Manifest, level: int, key: ExpertKey, weights: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    gate_up, down = stored_weights(reader, manifest, key, level)
    return [*gate_up.chunk(2), down]


def compensation(error: torch.Tensor, rank: int) -> torch.Tensor:
    """The product of factors of 3 bits that takes a part of an error away, float32 [N, K]; rank 0: zeros."""
    if not rank:
        return torch.zeros_like(error)
    u = dequantize3(*quantize3(factor(error, rank)[0]), error.shape[0])
    v = dequantize3(*quantize3(refit(u, error)), error.shape[1])
    return u.t() @ v


def added_bits(shapes: Sequence[torch.Size], rank: int) -> float:
    """Bits per weight of an expert that its compensator of one rank adds, without padding to whole blocks."""
    numbers = sum(rank * (rows + columns) for rows, columns in shapes)
    return FACTOR_BITS * numbers / sum(rows * columns for rows, columns in shapes)


def experts_of(model: Any) -> dict[int, Any]:
    """Maps each layer with experts to its module with `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I]."""
    layers = ((i, getattr(layer.mlp, "experts", None)) for i, layer in enumerate(model.model.layers))
    return {i: experts for i, experts in layers if experts is not None}


def matrices(experts: Any, expert: int) -> list[torch.Tensor]:
    """Gate and up [I, H] and down [H, I] of an expert, float32."""
    gate, up = experts.gate_up_proj[expert].detach().float().chunk(2)
    return [gate, up, experts.down_proj[expert].detach().float()]


@contextmanager
def replaced(
    experts: Any,
    plain: Sequence[Sequence[torch.Tensor]],
    better: Sequence[Sequence[torch.Tensor]],
    places: set[int],
) -> Iterator[None]:
    """Has a module of experts compute with other weights inside the block.

    Args:
        experts: the module, whose `forward` takes rows, indices of experts, and their weights.
        plain: gate, up and down of each expert.
        better: the same, for experts at some places of a token's ranking.
        places: these places, from 0.
    """
    original = experts.forward
    experts.forward = partial(_forward, experts.act_fn, plain, better, places)
    try:
        yield
    finally:
        experts.forward = original


def _forward(
    act: Callable[[torch.Tensor], torch.Tensor],
    plain: Sequence[Sequence[torch.Tensor]],
    better: Sequence[Sequence[torch.Tensor]],
    places: set[int],
    hidden: torch.Tensor,
    indices: torch.Tensor,
    shares: torch.Tensor,
) -> torch.Tensor:
    """Sums of experts, [T, H] like `hidden`; `indices` and `shares` are [T, k], in any order."""
    rows, out = hidden.reshape(-1, hidden.shape[-1]), torch.zeros_like(hidden).reshape(-1, hidden.shape[-1])
    order = shares.argsort(dim=1, descending=True, stable=True)
    indices, shares = indices.gather(1, order), shares.gather(1, order)
    for place in range(indices.shape[1]):
        weights = better if place in places else plain
        for expert in indices[:, place].unique().tolist():
            gate, up, down = weights[expert]
            at = (indices[:, place] == expert).nonzero()[:, 0]
            x = rows[at]
            y = (act(x @ gate.t()) * (x @ up.t())) @ down.t()
            out.index_add_(0, at, y * shares[at, place, None])
    return out.view_as(hidden)


Decoded = Mapping[int, Sequence[Sequence[torch.Tensor]]]
"""Layer -> gate, up and down of each of its experts."""


@contextmanager
def compensated(model: Any, plain: Decoded, better: Decoded, places: set[int]) -> Iterator[None]:
    """Has all layers of a model compute with other weights inside the block; see `replaced`."""
    with ExitStack() as stack:
        for layer, experts in experts_of(model).items():
            stack.enter_context(replaced(experts, plain[layer], better[layer], places))
        yield
