"""Shapes of the dense tensors of a store, where matrices of 4 bits are bytes (dense_groups)."""

from __future__ import annotations

from math import prod

from edgemoe.storage.files.header import Spec

BITS, GROUP, DTYPE = 4, 64, "U8"
"""Bits of a code; inputs that share a scale and a centre; the element type of a matrix in a store."""

ROWS = 32
"""Rows whose codes lie together."""


def fits(shape: tuple[int, ...]) -> bool:
    """Whether a matrix [N, K] has whole blocks of rows and whole groups."""
    return len(shape) == 2 and 0 not in shape and shape[0] % ROWS == 0 and shape[1] % GROUP == 0


def stored_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape [N, 9 K / 16] of the bytes of a matrix [N, K]."""
    return shape[0], shape[1] * 9 // 16


def matrix_shape(spec: Spec) -> tuple[int, ...]:
    """The shape of a dense tensor of a store in weights."""
    dtype, shape = spec
    return (shape[0], shape[1] * 16 // 9) if dtype == DTYPE and len(shape) == 2 else shape


def weights_of(spec: Spec) -> int:
    """The number of weights of a dense tensor of a store."""
    return prod(matrix_shape(spec))
