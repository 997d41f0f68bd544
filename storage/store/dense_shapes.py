"""Shapes of the dense tensors of a store, where matrices of 4 to 6 bits are bytes (dense_groups)."""

from __future__ import annotations

from math import prod

from edgemoe.storage.files.header import Spec

BITS, GROUP, DTYPE = (6, 5, 4), 64, "U8"
"""Bits that a code may have; inputs that share a scale and a centre; the element type of a matrix in a store."""

HEAD_BITS = (8, 6)
"""Bits that the weights of embedding and head may have where other dense weights have at most 8."""

ROWS = 32
"""Rows whose codes lie together."""


def fits(shape: tuple[int, ...]) -> bool:
    """Whether a matrix [N, K] has whole blocks of rows and whole groups."""
    return len(shape) == 2 and 0 not in shape and shape[0] % ROWS == 0 and shape[1] % GROUP == 0


def stored_shape(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """The shape of the bytes of a matrix [N, K], which differs by bits.

    Returns:
        [N, 9 K / 16] for 4 bits; [N, K / 64, 8 bits + 4] for 5 and 6.
    """
    rows, groups, size = shape[0], shape[1] // GROUP, GROUP // 8 * bits + 4
    return (rows, groups * size) if bits == 4 else (rows, groups, size)


def bits_of(stored: tuple[int, ...]) -> int:
    """Bits of a code, from the shape of a matrix's bytes."""
    return 4 if len(stored) == 2 else (stored[2] - 4) * 8 // GROUP


def matrix_shape(spec: Spec) -> tuple[int, ...]:
    """The shape of a dense tensor of a store in weights."""
    dtype, shape = spec
    if dtype != DTYPE or len(shape) not in (2, 3):
        return shape
    return (shape[0], shape[1] * GROUP) if len(shape) == 3 else (shape[0], shape[1] * 16 // 9)


def weights_of(spec: Spec) -> int:
    """The number of weights of a dense tensor of a store."""
    return prod(matrix_shape(spec))
