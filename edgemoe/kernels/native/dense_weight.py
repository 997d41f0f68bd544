"""The C structure of a dense weight."""

from __future__ import annotations

import torch

from edgemoe.kernels.native.structures import DenseWeight
from edgemoe.storage.store.dense_groups import columns_of
from edgemoe.storage.store.dense_shapes import bits_of

_BITS = {torch.bfloat16: 16, torch.int8: 8}
"""Type of a dense weight's tensor -> bits of a weight (csrc/dense/dense.h); uint8 tells them by its shape."""


def bits_of_weight(weight: torch.Tensor) -> int:
    """Bits of a weight in bf16, in int8, or in groups."""
    return _BITS.get(weight.dtype) or bits_of(tuple(weight.shape))


def dense_weight(weight: torch.Tensor, scale: torch.Tensor | None) -> DenseWeight:
    """The structure of a weight, which its tensors must outlive; arguments: see library.dense_product."""
    return DenseWeight(
        weight=weight.data_ptr(),
        row_scale=None if scale is None else scale.data_ptr(),
        rows=len(weight),
        cols=columns_of(weight),
        bits=bits_of_weight(weight),
    )
