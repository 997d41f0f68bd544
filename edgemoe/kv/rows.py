"""Rows of keys and values as they are stored: the plain reference of csrc/attention/kv_rows.c, with the same bits."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from edgemoe.kv.formats import BLOCK, GROUP, row_bytes


@cache
def row_of(kind: str, size: int) -> tuple[torch.dtype, int]:
    """The dtype and the number of elements of a stored row of `size` numbers.

    >>> row_of("bf16", 128), row_of("q8_0", 128)
    ((torch.bfloat16, 128), (torch.uint8, 136))
    """
    return (torch.bfloat16, size) if kind == "bf16" else (torch.uint8, row_bytes(kind, size))


def encode(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Stores rows.

    The scale of a block is rounded away from zero; a block with a number that is not finite has a NaN for a scale.

    Args:
        kind: one of KINDS.
        x: [..., D], bf16 or float32.

    Returns:
        [..., W], of row_of: bf16, or uint8.
    """
    if kind == "bf16":
        return x.bfloat16()
    size = x.shape[-1]
    blocks = F.pad(x.float(), (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    high, low = blocks.amax(-1), blocks.amin(-1)
    # Of 16 codes the number of the largest magnitude gets the lowest one, -8.
    largest = torch.maximum(high, -low) if kind == "q8_0" else torch.where(-low > high, low, high)
    # A device multiplies by the reciprocal of a number, so the divisor is a tensor.
    exact = largest / torch.full_like(largest, 127 if kind == "q8_0" else -8)
    scales = _away_from_zero(torch.where(exact.isfinite(), exact, torch.nan))
    empty = scales == 0  # of either sign
    scales, by = scales.masked_fill(empty, 0), scales.masked_fill(empty, 1)[..., None]
    stored = (scales.view(torch.int32) >> 16).to(torch.int16)  # bits: torch.bfloat16 has several NaNs
    lowest, highest = (-127, 127) if kind == "q8_0" else (-8, 7)
    codes = (blocks / by).round().nan_to_num(0).clamp(lowest, highest).flatten(-2).to(torch.int8)
    codes = codes[..., : -(-size // GROUP) * GROUP]
    if kind == "q4_0":
        halves = (codes + 8).view(torch.uint8).unflatten(-1, (-1, 2, GROUP // 2))
        codes = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2)
    return torch.cat((stored.view(torch.uint8), codes.view(torch.uint8)), dim=-1)


def _away_from_zero(x: torch.Tensor) -> torch.Tensor:
    """float32 -> the next number of larger magnitude that is a bf16; NaN stays NaN."""
    bits = x.contiguous().view(torch.int32)
    return torch.where(x.isnan(), x, ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32))


def decode(kind: str, rows: torch.Tensor, size: int) -> torch.Tensor:
    """Reads rows; a code times its scale is exact in float32.

    Args:
        kind: one of KINDS.
        rows: [..., W], as encode returns them.
        size: D.

    Returns:
        float32 [..., D].
    """
    if kind == "bf16":
        return rows.float()
    count = -(-size // BLOCK)
    scales, codes = rows[..., : 2 * count].contiguous().view(torch.bfloat16).float(), rows[..., 2 * count :]
    if kind == "q4_0":
        groups = codes.unflatten(-1, (-1, 1, GROUP // 2))
        numbers = torch.cat((groups & 15, groups >> 4), dim=-2).flatten(-3).float() - 8
    else:
        numbers = codes.contiguous().view(torch.int8).float()
    return numbers[..., :size] * scales.repeat_interleave(BLOCK, dim=-1)[..., :size]


def rotate(x: torch.Tensor, size: int) -> torch.Tensor:
    """Multiplies each run of `size` numbers with the Hadamard matrix over sqrt(size), which is its own inverse.

    >>> rotate(rotate(torch.arange(8.0), 4), 4).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]

    Args:
        x: [..., D].
        size: a power of two that divides D; 0: x stays as it is.

    Returns:
        float32 [..., D], or x.
    """
    if not size:
        return x
    turned, step = x.float(), 1
    while step < size:
        pairs = turned.unflatten(-1, (-1, 2, step))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        turned = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return turned.mul(size**-0.5)
