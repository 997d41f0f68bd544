"""The places of factors inside a compensator's bytes.

An expert has three projections: gate and up, which are the first and the second half of the rows of `gate_up`, and
down. Each has a rank of its own, maybe 0. A compensator is four arrays of 3-bit factors, one after another, then zeros
up to a multiple of 4 KiB:

    gate_up v    [gate + up, hidden]   V of gate, then of up
    gate_up u    [gate + up, inner]    U transposed, of gate, then of up
    down v       [down, inner]
    down u       [down, hidden]        U transposed

A row is cut into groups of 64 numbers, the last one padded with zeros. An array is two parts, each from a multiple of
64 bytes on, with G groups a row: codes uint8 [rank, G, 24] and scales bf16 [rank, G]. A number is (code - 4) * scale.
The 24 bytes of a group are eight little-endian lanes of 3 bytes: lane l has the codes of the numbers l, l + 8, ...,
l + 56 from its lowest bits on, so one shift of eight lanes gives eight neighbouring codes.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgemoe.storage.base import ByteRange
from edgemoe.storage.record.offsets import RecordGeometry, align

GROUP = 64
"""Numbers of a row that share a scale."""

_PART = 64
"""Bytes: every part of an array starts at a multiple of this."""

Ranks = tuple[int, int, int]
"""Ranks of gate, up and down."""


@dataclass(frozen=True)
class FactorArray:
    """The place of one array of factors [rows, columns] in a compensator's bytes.

    >>> array = FactorArray(offset=0, rows=2, columns=100)
    >>> array.groups, array.scales, array.end
    (2, ByteRange(offset=128, length=8), 192)
    """

    offset: int
    rows: int
    columns: int

    @property
    def groups(self) -> int:
        """Groups of a row."""
        return -(-self.columns // GROUP)

    @property
    def codes(self) -> ByteRange:
        """uint8 [rows, groups, 24]. Scales follow."""
        return ByteRange(self.offset, self.rows * self.groups * 24)

    @property
    def scales(self) -> ByteRange:
        """bf16 [rows, groups]."""
        return ByteRange(align(self.codes.end, _PART), self.rows * self.groups * 2)

    @property
    def end(self) -> int:
        """First byte past the array, a multiple of 64."""
        return align(self.scales.end, _PART)


@dataclass(frozen=True)
class CompensatorGeometry:
    """Shapes of a compensator: the expert's hidden size H and inner size I, and the three ranks.

    >>> geometry = CompensatorGeometry(hidden=2048, inner=768, ranks=(32, 32, 32))
    >>> geometry.arrays["down", "u"].columns, geometry.nbytes, geometry.used
    (2048, 110592, 109824)
    """

    hidden: int
    inner: int
    ranks: Ranks

    @classmethod
    def of(cls, geometry: RecordGeometry, ranks: Ranks) -> CompensatorGeometry:
        """The compensator of an expert whose record has this geometry."""
        down = next(matrix for matrix in geometry.matrices if matrix.name == "down")
        return cls(down.rows, down.cols, ranks)

    @property
    def most(self) -> int:
        """The largest rank that a projection can have."""
        return min(self.hidden, self.inner)

    @property
    def arrays(self) -> dict[tuple[str, str], FactorArray]:
        """(matrix, "v" or "u") -> its place, in the order of the bytes."""
        gate, up, down = self.ranks
        shapes = {
            ("gate_up", "v"): (gate + up, self.hidden),
            ("gate_up", "u"): (gate + up, self.inner),
            ("down", "v"): (down, self.inner),
            ("down", "u"): (down, self.hidden),
        }
        out, at = {}, 0
        for name, (rows, columns) in shapes.items():
            out[name] = FactorArray(at, rows, columns)
            at = out[name].end
        return out

    @property
    def used(self) -> int:
        """Bytes without the zeros at the end."""
        return self.arrays["down", "u"].end

    @property
    def nbytes(self) -> int:
        """Bytes of a compensator, a multiple of 4 KiB; 0 where every rank is 0."""
        return align(self.used)
