"""Sizes and offsets inside a record, computed from the shapes of its matrices.

    record   = base | d4 | d8                    every plane a multiple of 4 KiB
    base     = parameters | top 2 bits of every code
    d4       = the next 2 bits
    d8       = the last 4 bits

In memory the same bytes are two arrays of nibbles, p4 (code >> 4) and p0 (code & 15), each of `codes_bytes` bytes: the
packed nibbles of all matrices one after another, then zeros up to a multiple of 8 KiB. base and d4 are each half as
long as p4, and d8 equals p0. So the record's prefix at level 4 is exactly as long as parameters + p4 and is read
directly into p4's place, d4 before base (`planes.merge`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from edgemoe.storage.base import BLOCK, PLANES_OF_LEVEL, ByteRange, Plane


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
    """

    name: str
    rows: int
    cols: int
    group: int
    padded_rows: int
    padded_cols: int

    @classmethod
    def of(cls, name: str, rows: int, cols: int, group: int | None = None) -> MatrixSpec:
        """Builds the spec of a [rows, cols] matrix; the group defaults to 64, or to 32 where only 32 divides."""
        if group is None:
            group = 32 if cols % 64 and (cols % 32 == 0 or cols < 64) else 64
        return cls(name, rows, cols, group, align(rows, 16), align(cols, group))

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
    """Sizes and offsets (bytes) of one expert's record."""

    matrices: tuple[MatrixSpec, ...]
    max_level: int

    @property
    def gated(self) -> bool:
        """Whether an expert has a gate, whose rows come before those of up in the matrix gate_up."""
        return self.matrices[0].name == "gate_up"

    @cached_property
    def parameter_bytes(self) -> int:
        """All matrices' group parameters, padded to 4 KiB."""
        return align(sum(m.parameter_bytes for m in self.matrices))

    @cached_property
    def codes_bytes(self) -> int:
        """One nibble array over all matrices, padded to 8 KiB so that its halves are whole blocks."""
        return align(sum(m.nibble_bytes for m in self.matrices), 2 * BLOCK)

    @cached_property
    def weights(self) -> int:
        """Source weights in an expert."""
        return sum(m.weights for m in self.matrices)

    @cached_property
    def planes(self) -> tuple[ByteRange, ...]:
        """Offset and length in the record of every plane up to max_level."""
        half = self.codes_bytes // 2
        lengths = (self.parameter_bytes + half, half, self.codes_bytes)[: PLANES_OF_LEVEL[self.max_level]]
        return tuple(ByteRange(sum(lengths[:i]), n) for i, n in enumerate(lengths))

    @property
    def record_bytes(self) -> int:
        """Length of a whole record."""
        return self.planes[-1].end

    def prefix_bytes(self, level: int) -> int:
        """Bytes read from disk for an absent expert at `level`."""
        return self.planes[PLANES_OF_LEVEL[level] - 1].end if level else 0

    def span(self, first: Plane, last: Plane) -> ByteRange:
        """The contiguous range of the planes first..last."""
        start = self.planes[first].offset
        return ByteRange(start, self.planes[last].end - start)

    def matrix_offsets(self) -> list[tuple[MatrixSpec, int, int]]:
        """(matrix, offset into the parameters, offset into a nibble array) for each matrix."""
        out, parameters, codes = [], 0, 0
        for matrix in self.matrices:
            out.append((matrix, parameters, codes))
            parameters += matrix.parameter_bytes
            codes += matrix.nibble_bytes
        return out
