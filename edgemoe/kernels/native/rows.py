"""Operators on rows of a prompt (csrc/rows.c), on all threads of the kernel."""

from __future__ import annotations

import torch

from edgemoe.kernels.native import library as native


def add_weighted_rows(
    sums: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor
) -> None:
    """Adds each row, times its weight, to the sum of its token; one row after another.

    Args:
        sums: float32 [T, H], contiguous; changed.
        rows: bf16 [R, H], contiguous.
        tokens: int64 [R], each below T.
        weights: float32 [R].

    Raises:
        MemoryError: no memory for the call.
        ValueError: sizes that differ.
    """
    if sums.shape[1] != rows.shape[1] or not len(rows) == len(tokens) == len(weights):
        raise ValueError(f"expected rows of {sums.shape[1]} with a token and a weight each, got {rows.shape}")
    result = native.library().edgemoe_add_rows(
        *(native.threads(), rows.data_ptr(), tokens.contiguous().data_ptr()),
        *(weights.contiguous().data_ptr(), *rows.shape, sums.data_ptr()),
    )
    if result:
        raise native.failure(result, "sums of rows")
