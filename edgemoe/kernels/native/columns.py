"""Codes of a matrix's columns with error feedback (csrc/recode/columns.c), on the calling thread."""

from __future__ import annotations

import torch

from edgemoe.kernels.native import library as native
from edgemoe.storage.record.encode import Quantized
from edgemoe.storage.record.nested_codes import (
    Block,
    ColumnOrder,
    Importance,
    nested_codes,
    plain_columns,
    row_codes,
)
from edgemoe.storage.record.offsets import MatrixSpec

MOST_COLUMNS = 64
"""Columns of a call (csrc/recode/columns.h)."""


def calibrated_codes(
    weight: torch.Tensor, hessian: torch.Tensor, spec: MatrixSpec, importance: Importance, bits: int
) -> Quantized:
    """Quantizes a matrix with error feedback, by the compiled function where there is one.

    Args:
        weight: float32 [rows, cols].
        spec: sizes of the matrix, and columns of a group.
        importance: level -> how much that level's error counts.
        bits: number of bits of the finest codes, 4 to 8.
        hessian: float32 [cols, cols], sums of products of the matrix's inputs.

    Returns:
        codes and parameters, as nested_codes.
    """
    columns = code_columns if native.available() else plain_columns
    return nested_codes(weight, ColumnOrder(hessian, spec.padded_cols), spec, importance, bits, columns)


def calibrated_rows(weight: torch.Tensor, scales: torch.Tensor, order: ColumnOrder) -> torch.Tensor:
    """Codes of 8 bits with error feedback, by the compiled function where there is one; see nested_codes.row_codes."""
    return row_codes(weight, scales, order, code_columns if native.available() else plain_columns)


def code_columns(block: Block, start: int, end: int, codes: torch.Tensor) -> torch.Tensor:
    """Codes some columns, with the bits of `nested_codes.plain_columns`.

    Args:
        block: the matrix.
        start, end: columns [start, end), at most MOST_COLUMNS.
        codes: uint8 [K, rows], whose rows [start, end) are written.

    Returns:
        errors, float32 [levels, end - start, rows].

    Raises:
        ValueError: rows in other numbers than multiples of 8, or more columns.
    """
    count, columns, rows = block.remainder.shape
    errors = torch.empty(count, end - start, rows)
    levels = torch.tensor(block.levels)
    importance = torch.tensor([float(block.importance[level]) for level in block.levels])
    tensors = block.remainder, block.upper, block.steps, block.centres, codes
    assert all(tensor.is_contiguous() for tensor in tensors)
    result = native.library().edgemoe_code_columns(
        *(block.rest, *(tensor.data_ptr() for tensor in tensors[:4]), columns, rows, start, end),
        *(levels.data_ptr(), importance.data_ptr(), count, block.unit, codes.data_ptr(), errors.data_ptr()),
    )
    if result:
        raise native.failure(result, f"codes of columns {start} to {end} of {rows} rows")
    return errors
