"""Rotations of heads by their tokens' positions (csrc/attention/attention.h)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

ROTATE_HALVES, ROTATE_WIDE_HALVES, ROTATE_WIDE_PAIRS = range(3)
"""Numbers of a head that are rotated together: of two halves, by bf16 tables, with each product rounded; of two halves,
or neighbours, by float32 tables, with the sum rounded alone."""


def check_tables(tables: Iterable[torch.Tensor], rows: int, rotated: int, pairing: int) -> None:
    """Refuses tables that C would read past.

    Args:
        tables: cosine and sine of each row's position, [rows, rotated], contiguous: bf16, or float32 where a wide
            pairing reads the first half of each row. Pair i has number i.
        rows, rotated: the sizes.
        pairing: how numbers are rotated.

    Raises:
        ValueError: naming both sizes and types.
    """
    dtype = torch.bfloat16 if pairing == ROTATE_HALVES else torch.float32
    for table in tables:
        if table.shape != (rows, rotated) or not table.is_contiguous() or table.dtype != dtype:
            raise ValueError(
                f"expected a rotation of {(rows, rotated)} in {dtype}, got {tuple(table.shape)} in {table.dtype}"
            )
