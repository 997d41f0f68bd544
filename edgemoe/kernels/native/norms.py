"""Norms of rows (csrc/dense/dense.c), in the forms that their weights show."""

from __future__ import annotations

import torch

NARROW_NORM, WIDE_NORM, CENTRED_NORM = range(3)
"""Forms of csrc/dense/dense.h."""


def form_of(weight: torch.Tensor) -> int:
    """The form of a norm, by its weight: bf16 [K], float32 [K] or float32 [2, K] (kernels.program.Norm)."""
    if weight.dtype != torch.float32:
        return NARROW_NORM
    return WIDE_NORM if weight.ndim == 1 else CENTRED_NORM
