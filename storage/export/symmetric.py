"""Symmetric integers with a scale per group: w = scale * (code - 2^(bits - 1)), as other engines compute them.

A group of a store whose centre is 0 has such codes at 4 bits, and keeps them; others are quantized again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from edgemoe.storage.export.matrices import Affine
from edgemoe.storage.record.planes import Bytes, round_up_bf16

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Symmetric:
    """A matrix [N, K] of symmetric integers.

    Args:
        codes: uint8 [N, K], 0..2^bits - 1.
        scale: [N, K / group], of the dtype in which it is stored.
        group: consecutive inputs that share a scale.
        middle: the code of weight 0.
        kept: number of groups that keep the store's codes and scale.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    group: int
    middle: int
    kept: int = 0

    def affine(self) -> Affine:
        """Converts the codes to affine ones, with equal weights."""
        step = self.scale.float()
        return Affine(self.codes, step, torch.zeros_like(step), float(self.middle), self.group)


def int8(matrix: Affine, group: int, dtype: torch.dtype, *, lowest: int = -128) -> Symmetric:
    """Quantizes a matrix to 8 bits.

    Args:
        matrix: K a multiple of group, which divides its own.
        group: consecutive inputs that share a scale.
        dtype: the dtype of the scales: bf16, or f16.
        lowest: the lowest integer in use, -128 or -127.
    """
    return _quantize(matrix.regrouped(group), 128, dtype, lowest)


def int4(matrix: Affine, group: int) -> Symmetric:
    """Keeps the codes of groups whose centre is 0, and quantizes the others to 4 bits. Scales are bf16.

    Args:
        matrix: the matrix at level 8 or 4; K is a multiple of group, which divides the matrix's own group.
        group: consecutive inputs that share a scale.
    """
    matrix = matrix.regrouped(group)
    own = matrix.centre == 0
    made = None if bool(own.all()) else _quantize(matrix, 8, torch.bfloat16, -8)
    if not bool(own.any()):
        assert made is not None
        return made
    four, times = (matrix.codes >> 4, 16) if matrix.middle != 8 else (matrix.codes, 1)
    scale = (matrix.step * times).to(torch.bfloat16)
    if made is not None:
        rows = matrix.shape[0]
        kept, new = (t.view(rows, -1, group) for t in (four, made.codes))
        four = torch.where(own.unsqueeze(-1), kept, new).reshape(matrix.shape)
        scale = torch.where(own, scale, made.scale)
    return Symmetric(four, scale, group, 8, int(own.sum()))


def _quantize(matrix: Affine, middle: int, dtype: torch.dtype, lowest: int) -> Symmetric:
    """Quantizes to codes 0..2 * middle - 1 against the stored scale, which is rounded up so that no weight is cut."""
    rows, cols = matrix.shape
    codes = np.ascontiguousarray(matrix.codes.numpy())
    least, most = (edge.view(rows, -1) for edge in _edges(codes, matrix.group))
    low, high = least * matrix.step + matrix.offset, most * matrix.step + matrix.offset
    low, high = torch.minimum(low, high), torch.maximum(low, high)  # steps have either sign
    scale = _round_up(torch.maximum(high / (middle - 1), low / lowest).clamp_min(0), dtype)
    divisor = scale.float().clamp_min(_TINY)
    # floor(x + 1/2) rounds; the cast of a non-negative value is its floor, in numpy several times as fast.
    values = torch.from_numpy(codes.astype(np.float32)).view(rows, -1, matrix.group)
    values.mul_((matrix.step / divisor).unsqueeze(-1))
    values.add_((matrix.offset / divisor + (middle + 0.5)).unsqueeze(-1))
    values.clamp_(middle + lowest, 2 * middle - 1)
    made = torch.from_numpy(values.numpy().astype(np.uint8)).view(rows, cols)
    return Symmetric(made, scale, matrix.group, middle)


def _edges(codes: Bytes, group: int) -> list[torch.Tensor]:
    """The least and the largest code of every group of [N, K], float32 [N * K / group] each."""
    # Vectors of many groups at a time: a reduction along so short an axis takes as long as all of `_quantize` else.
    words = np.ascontiguousarray(codes.view(np.uint64).reshape(-1, group // 8).T).view(np.uint8)
    out = []
    for ufunc in (np.minimum, np.maximum):
        eighths = np.ascontiguousarray(ufunc.reduce(words, axis=0).reshape(-1, 8).T)
        out.append(torch.from_numpy(ufunc.reduce(eighths, axis=0).astype(np.float32)))
    return out


def _round_up(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bfloat16:
        return round_up_bf16(scale)
    rounded = scale.to(dtype)
    above = (rounded.view(torch.int16) + 1).view(dtype)  # the next number, as none is negative
    return torch.where(rounded.float() < scale, above, rounded)
