"""How many bits the codes of each layer's matrices have in a store, by what the checkpoint has (docs/decisions/0055).

Codes of the source that a record can keep are kept. Other matrices are coded again, with the fewest bits whose error
stays within a third of the source's own error. Both errors are expected ones for normally distributed weights, so
that headers alone decide; the conversion measures what it wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from edgemoe.errors import ModelRefused
from edgemoe.storage.formats.base import Weight
from edgemoe.storage.record.offsets import BITS, MatrixSpec, RecordGeometry

WITHIN = 1 / 3
"""Largest error of coding again, as a part of the source's own."""

_SPREAD = {32: 4.14, 64: 4.75, 128: 5.31, 256: 5.83}
"""Group -> expected difference between the largest and the smallest of so many normally distributed weights."""

_OWN = 1.6
"""Relative error of a format with b bits per weight, groups' parameters included, times 2^b: within a quarter of what
the formats have that were measured, from 2 to 8 bits (docs/decisions/0055)."""

_PARTS = {"gate_up": 2, "up": 1, "down": 3}
"""How much the squared error of a matrix counts: a model's answers change more by down's error."""

_UNQUANTIZED = 16
"""Bits per weight from which a tensor counts as not quantized."""

_DEFAULT_GROUP = 64


@dataclass(frozen=True)
class SourceMatrix:
    """The tensors of all experts of a layer that make up one of their matrices.

    Args:
        types: names of their types, sorted.
        bits_per_weight: bits per weight on disk.
        bits: most bits of their codes; None: some have none that a record keeps.
        group: narrowest group of their codes; None: see `bits`.
    """

    types: tuple[str, ...]
    bits_per_weight: float
    bits: int | None
    group: int | None

    @classmethod
    def of(cls, weights: Iterable[Weight], count: int) -> SourceMatrix:
        """Describes the tensors, of `count` weights in all."""
        types, size, bits, group = set[str](), 0, list[int](), list[int | None]()
        for weight in weights:
            types.add(weight.type)
            size += weight.nbytes
            bits.append(weight.bits)
            group.append(weight.group)
        groups = [each for each in group if each is not None]
        kept = len(groups) == len(group)
        return cls(
            tuple(sorted(types)), 8 * size / count, max(bits) if kept else None, min(groups) if kept else None
        )

    @property
    def quantized(self) -> bool:
        """Whether the weights were quantized before."""
        return self.bits is not None or self.bits_per_weight < _UNQUANTIZED

    @property
    def error(self) -> float:
        """Expected relative error of the source against what it was made of."""
        return _OWN * math.exp2(-self.bits_per_weight)

    def kept_bits(self, max_level: int | None) -> int | None:
        """Bits of the record's codes that keep the source's; None: they are not kept."""
        if self.bits is None or (max_level == 4 and self.bits > 4):
            return None
        return min(bits for bits in BITS if bits >= self.bits)


Found = Mapping[int, Sequence[SourceMatrix]]
"""Layer -> what the checkpoint has of each matrix."""


def coding_error(bits: int, group: int) -> float:
    """Expected relative error of codes of `bits` bits in groups."""
    return _SPREAD[group] / ((1 << bits) - 1) / math.sqrt(12)


def choose_geometry(
    matrices: tuple[MatrixSpec, ...], sources: Found, max_level: int | None, directory: object
) -> RecordGeometry:
    """Chooses the geometry of a store: the smallest one that keeps within the errors.

    Args:
        matrices: the matrices' sizes, without groups of codes and limits.
        sources: every layer of the checkpoint.
        max_level: 8 or 4, the highest level to store; None: as many bits as the source can fill.
        directory: the checkpoint's, for messages.

    Raises:
        ModelRefused: level 8 where no matrix can fill more than 4 bits.
    """
    groups = [_groups(spec, i, sources, max_level) for i, spec in enumerate(matrices)]
    wide = _with_groups(matrices, [each[0] for each in groups])
    if max_level == 4:
        return RecordGeometry(wide, 4)
    if not any(matrix.quantized for layer in sources.values() for matrix in layer):
        return RecordGeometry(matrices, 8)
    made = (_limited(_with_groups(matrices, each), sources) for each in product(*groups))
    geometry = min(made, key=lambda each: sum(each.of_layer(layer).record_bytes for layer in sources))
    if max_level == 8 and geometry.max_level == 4:
        raise ModelRefused(
            "experts with more than 4 bits for level 8",
            f"experts with 4-bit codes in {directory}, which level 4 keeps exactly",
            "leave --max-level out",
        )
    return geometry


def _groups(spec: MatrixSpec, index: int, layers: Found, max_level: int | None) -> list[int]:
    """Groups that a matrix may have: the narrowest of all codes that are kept; without any, the default and 32."""
    sources = [layer[index] for layer in layers.values()]
    groups = [each.group for each in sources if each.group and each.kept_bits(max_level)]
    if not groups:
        return sorted({spec.group, min(spec.group, 32)}, reverse=True)
    group = min(groups)
    if len(groups) < len(sources) and spec.cols % _DEFAULT_GROUP == 0:
        group = min(group, _DEFAULT_GROUP)  # wider groups would take more bits for the others
    return [group]


def _with_groups(matrices: Sequence[MatrixSpec], groups: Sequence[int]) -> tuple[MatrixSpec, ...]:
    pairs = zip(matrices, groups, strict=True)
    return tuple(MatrixSpec.of(spec.name, spec.rows, spec.cols, group) for spec, group in pairs)


def _limited(matrices: tuple[MatrixSpec, ...], layers: Found) -> RecordGeometry:
    bits = {layer: _bits_of(matrices, sources) for layer, sources in layers.items()}
    return RecordGeometry.limited(matrices, bits)


def _bits_of(matrices: Sequence[MatrixSpec], sources: Sequence[SourceMatrix]) -> tuple[int, ...]:
    """The bits of a layer's matrices: kept ones, and for all others the fewest that keep within the error."""
    kept = [source.kept_bits(None) for source in sources]
    own = _of_expert(matrices, [source.error for source in sources])
    for bits in BITS:
        errors = [
            0.0 if of_source else coding_error(bits, spec.group)
            for spec, of_source in zip(matrices, kept, strict=True)
        ]
        if _of_expert(matrices, errors) <= WITHIN * own:
            break
    return tuple(of_source or bits for of_source in kept)


def _of_expert(matrices: Sequence[MatrixSpec], errors: Sequence[float]) -> float:
    """The relative error of an expert, from the errors of its matrices."""
    parts = [_PARTS[spec.name] for spec in matrices]
    squares = sum(part * error**2 for part, error in zip(parts, errors, strict=True))
    return math.sqrt(squares / sum(parts))
