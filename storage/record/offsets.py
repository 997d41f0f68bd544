"""Sizes and offsets inside a record, computed from the shapes of its matrices.

    record   = base | d4 | d8                    every plane a multiple of 4 KiB
    base     = parameters | top 2 bits of every code
    d4       = the next 2 bits
    d8       = the last 4 bits

In memory the same bytes are two arrays of nibbles, p4 (code >> 4) and p0 (code & 15), each of `codes_bytes` bytes: the
packed nibbles of all matrices one after another, then zeros up to a multiple of 8 KiB. base and d4 are each half as
long as p4, and d8 equals p0. So the record's prefix at level 4 is exactly as long as parameters + p4 and is read
directly into p4's place, d4 before base (`planes.merge`).

A store may limit its codes (docs/decisions/0055). A matrix whose limit is 4 has no codes in p0 and d8. A layer may have
fewer bits than the store: of a matrix's codes of 5 or 6 bits d8 has the 1 or 2 bits below the top 4 (`record.trimmed`),
of 4 bits none, and a layer where no matrix has more than 4 bits has no d8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from edgemoe.storage.base import BLOCK, PLANES_OF_LEVEL, ByteRange, Plane

BITS = (4, 5, 6, 8)
"""Numbers of bits that the codes of a matrix may have in a layer of a store whose highest level is 8."""


def align(n: int, to: int = BLOCK) -> int:
    """Rounds n up to a multiple of `to`."""
    return -(-n // to) * to


@dataclass(frozen=True)
class MatrixSpec:
    """One weight matrix of an expert, as quantized.

    Args:
        name: `gate_up` or `down`.
        rows: output size N of the source matrix [N, K].
        cols: input size K.
        group: consecutive inputs that share a scale and a centre.
        padded_rows: N rounded up to 16, the kernel's granule; added rows are zero.
        padded_cols: K rounded up to a multiple of group; added columns are zero.
        limit: 8, or 4: no layer has codes of more than 4 bits, and level 8 computes the matrix at level 4.
    """

    name: str
    rows: int
    cols: int
    group: int
    padded_rows: int
    padded_cols: int
    limit: int = 8

    @classmethod
    def of(cls, name: str, rows: int, cols: int, group: int | None = None, limit: int = 8) -> MatrixSpec:
        """Builds the spec of a [rows, cols] matrix; the group defaults to 64, or to 32 where only 32 divides."""
        if group is None:
            group = 32 if cols % 64 and (cols % 32 == 0 or cols < 64) else 64
        return cls(name, rows, cols, group, align(rows, 16), align(cols, group), limit)

    @property
    def weights(self) -> int:
        """Weights of the source matrix, without padding."""
        return self.rows * self.cols

    @property
    def nibble_bytes(self) -> int:
        """Bytes of one packed nibble array [padded_rows, padded_cols]."""
        return self.padded_rows * self.padded_cols // 2

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the group parameters: bf16 [padded_cols / group, padded_rows, 2]."""
        return self.padded_cols // self.group * self.padded_rows * 4


@dataclass(frozen=True)
class RecordGeometry:
    """Sizes and offsets (bytes) of one expert's record.

    >>> matrices = (MatrixSpec.of("gate_up", 128, 64, limit=4), MatrixSpec.of("down", 64, 64))
    >>> geometry = RecordGeometry(matrices, max_level=8, layers=((0, (4, 6)), (1, (4, 4))))
    >>> [geometry.of_layer(layer).max_level for layer in range(3)]
    [8, 4, 8]

    Args:
        matrices: gate_up and down.
        max_level: the highest level of the store, or of a layer.
        layers: (layer number, bits of each matrix's codes) for every layer with fewer bits than the limits, ascending.
        bits: number of bits of the codes of each matrix, members of BITS, where this is the geometry of a layer that
            `layers` names; empty: each matrix has as many as its limit allows.
    """

    matrices: tuple[MatrixSpec, ...]
    max_level: int
    layers: tuple[tuple[int, tuple[int, ...]], ...] = ()
    bits: tuple[int, ...] = ()

    @classmethod
    def limited(cls, matrices: tuple[MatrixSpec, ...], bits: Mapping[int, tuple[int, ...]]) -> RecordGeometry:
        """Builds the geometry of a store from the bits of each layer's matrices.

        Args:
            matrices: the matrices' sizes, without limits.
            bits: layer -> bits of each matrix, each one of BITS.
        """
        most = [max(column) for column in zip(*bits.values(), strict=True)]
        if max(most) == 4:
            return cls(matrices, 4)
        limits = tuple(4 if each == 4 else 8 for each in most)
        specs = tuple(replace(spec, limit=limit) for spec, limit in zip(matrices, limits, strict=True))
        return cls(specs, 8, tuple((layer, each) for layer, each in sorted(bits.items()) if each != limits))

    def of_layer(self, layer: int) -> RecordGeometry:
        """The geometry of a layer's records on disk; its `max_level` is the highest level of that layer."""
        return self._of_layer.get(layer, self)

    @property
    def layer_numbers(self) -> set[int]:
        """The layers that `layers` names."""
        return set(self._of_layer)

    @cached_property
    def _of_layer(self) -> dict[int, RecordGeometry]:
        return {
            layer: RecordGeometry(self.matrices, 8 if max(bits) > 4 else 4, bits=bits)
            for layer, bits in self.layers
        }

    @cached_property
    def level_limits(self) -> dict[int, int]:
        """Layer -> its highest level, of the layers whose highest level is below the store's."""
        return {
            layer: geometry.max_level
            for layer, geometry in self._of_layer.items()
            if geometry.max_level < self.max_level
        }

    @property
    def gated(self) -> bool:
        """Whether an expert has a gate. Its rows come before the rows of up in the matrix gate_up."""
        return self.matrices[0].name == "gate_up"

    @cached_property
    def parameter_bytes(self) -> int:
        """All matrices' group parameters, padded to 4 KiB."""
        return align(sum(m.parameter_bytes for m in self.matrices))

    @cached_property
    def codes_bytes(self) -> int:
        """The nibble array p4 over all matrices, padded to 8 KiB so that its halves are whole blocks."""
        return align(sum(m.nibble_bytes for m in self.matrices), 2 * BLOCK)

    @cached_property
    def low_bytes(self) -> int:
        """The nibble array p0 over the matrices with more than 4 bits, padded as p4."""
        return align(sum(m.nibble_bytes for m in self.matrices if m.limit > 4), 2 * BLOCK)

    @cached_property
    def weights(self) -> int:
        """Source weights in an expert."""
        return sum(m.weights for m in self.matrices)

    @cached_property
    def matrix_bits(self) -> tuple[int, ...]:
        """Bits of each matrix's codes: `bits`, or what limits and `max_level` allow."""
        return self.bits or tuple(min(m.limit, self.max_level) for m in self.matrices)

    @property
    def is_limited(self) -> bool:
        """Whether a matrix or a layer of the store has fewer bits than `max_level`."""
        return bool(self.layers) or (self.max_level == 8 and any(m.limit < 8 for m in self.matrices))

    @property
    def is_trimmed(self) -> bool:
        """Whether d8 is shorter on disk than p0 in memory: some matrices have fewer than 8 bits."""
        return bool(self.bits) and self.max_level == 8 and self.bits != tuple(m.limit for m in self.matrices)

    @cached_property
    def planes(self) -> tuple[ByteRange, ...]:
        """Offset and length in the record of every plane up to max_level."""
        half = self.codes_bytes // 2
        low = self.low_bytes
        if self.is_trimmed:
            low = align(sum(size for _, _, _, size in self.low_places()))
        lengths = (self.parameter_bytes + half, half, low)[: PLANES_OF_LEVEL[self.max_level]]
        return tuple(ByteRange(sum(lengths[:i]), n) for i, n in enumerate(lengths))

    @property
    def record_bytes(self) -> int:
        """Length of a whole record."""
        return self.planes[-1].end

    def prefix_bytes(self, level: int) -> int:
        """Bytes read from disk for an absent expert at `level`, or at max_level if that is lower."""
        return self.planes[PLANES_OF_LEVEL[min(level, self.max_level)] - 1].end if level else 0

    def span(self, first: Plane, last: Plane) -> ByteRange:
        """The contiguous range of the planes first..last."""
        start = self.planes[first].offset
        return ByteRange(start, self.planes[last].end - start)

    def matrix_offsets(self) -> list[tuple[MatrixSpec, int, int]]:
        """(matrix, offset into the parameters, offset into p4) for each matrix."""
        out, parameters, codes = [], 0, 0
        for matrix in self.matrices:
            out.append((matrix, parameters, codes))
            parameters += matrix.parameter_bytes
            codes += matrix.nibble_bytes
        return out

    def low_offsets(self) -> list[int]:
        """Offset into p0 for each matrix; of one without codes there, where they would begin."""
        sizes = [matrix.nibble_bytes if matrix.limit > 4 else 0 for matrix in self.matrices]
        return [sum(sizes[:i]) for i in range(len(sizes))]

    def low_places(self) -> list[tuple[int, int, int, int]]:
        """(index of a matrix, its bits, offset into p0, bytes in d8) for each matrix with codes in p0."""
        return [
            (i, bits, at, matrix.nibble_bytes * (bits - 4) // 4)
            for i, (matrix, bits, at) in enumerate(
                zip(self.matrices, self.matrix_bits, self.low_offsets(), strict=True)
            )
            if matrix.limit > 4
        ]
