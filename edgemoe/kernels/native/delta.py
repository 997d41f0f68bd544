"""The recurrence of linear attention, one call of csrc/delta.c."""

from __future__ import annotations

from typing import NamedTuple

import torch

from edgemoe.kernels.native import library as native

MOST_KEY_DIM = 1024
"""Largest size of a key (`MOST_KEY_DIM` in csrc/delta.c)."""


class DeltaRows(NamedTuple):
    """The inputs of a recurrence for consecutive tokens of one sequence.

    Attributes:
        queries, keys: bf16 [T, key_heads, key_dim], as projected.
        values: bf16 [T, heads, value_dim]; heads is a multiple of key_heads.
        decay: float32 [T, heads, 1], or [T, heads, key_dim] where each number of a key has its own: the logarithm of
            the fraction of the state that is kept.
        rate: float32 [T, heads], by how much a token replaces what its key finds.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor


def delta_rule(rows: DeltaRows, state: torch.Tensor) -> torch.Tensor:
    """Computes the gated delta rule, with queries and keys divided by their norms, token by token.

    The bits of a token do not depend on the number of tokens in a call.

    Args:
        rows: contiguous.
        state: float32 [heads, key_dim, value_dim], contiguous: before the tokens; overwritten with the one after them.

    Returns:
        bf16 [T, heads, value_dim].

    Raises:
        MemoryError: no memory for the call.
        ValueError: sizes of the arguments differ, or a key has more than MOST_KEY_DIM numbers.
    """
    tokens, key_heads, key_dim = rows.keys.shape
    heads, value_dim = rows.values.shape[1:]
    decays = rows.decay.shape[-1]
    _check(rows, state)
    out = torch.empty_like(rows.values)
    result = native.library().edgemoe_delta_rule(
        native.threads(),
        *(each.data_ptr() for each in rows),
        *(tokens, key_heads, heads, key_dim, value_dim, decays),
        *(state.data_ptr(), out.data_ptr()),
    )
    if result:
        raise native.failure(result, "a delta rule")
    return out


def _check(rows: DeltaRows, state: torch.Tensor) -> None:
    """Raises ValueError for arguments of delta_rule that do not go together."""
    tokens, key_heads, key_dim = rows.keys.shape
    heads, value_dim = rows.values.shape[1:]
    decays = rows.decay.shape[-1]
    sizes = [(tokens, key_heads, key_dim)] * 2 + [
        (tokens, heads, value_dim),
        (tokens, heads, decays),
        (tokens, heads),
    ]
    if [tuple(each.shape) for each in rows] != sizes or state.shape != (heads, key_dim, value_dim):
        raise ValueError(
            f"expected rows and a state of equal sizes, got {[list(each.shape) for each in rows]}"
        )
    if not all(each.is_contiguous() for each in (*rows, state)):
        raise ValueError("expected contiguous rows and a contiguous state, got others")
