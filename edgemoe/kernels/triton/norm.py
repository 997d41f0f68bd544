"""RMS norms of rows, in one launch that a graph can hold: a program computes one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.products import OPTIONS

_PER_WARP = 256
"""Numbers of a row per warp."""

_MOST_WARPS = 8


def normalise(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor, *, plus_one: bool, rounded: bool
) -> None:
    """Launches out = weight * x / sqrt(mean(x^2) + epsilon) for each row.

    Args:
        x: bf16 [R, K], contiguous, R at least 1.
        weight: bf16 or float32 [K].
        epsilon: the number that is added to the mean.
        out: bf16 [R, K], contiguous.
        plus_one: multiply by 1 + weight.
        rounded: round to bf16 before the product with the weight as well as after it.
    """
    rows, cols = x.shape
    padded = triton.next_power_of_2(cols)
    warps = min(max(padded // _PER_WARP, 1), _MOST_WARPS)
    rms_norm[(rows,)](x, weight, out, cols, epsilon, padded, plus_one, rounded, num_warps=warps, **OPTIONS)


@triton.jit
def rms_norm(
    x, weight, out, cols, epsilon, COLS: tl.constexpr, PLUS_ONE: tl.constexpr, ROUNDED: tl.constexpr
):
    """A program normalises one row: see normalise."""
    at = tl.arange(0, COLS)
    inside = at < cols
    row = tl.program_id(0).to(tl.int64) * cols + at
    factors = tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    numbers = tl.load(x + row, mask=inside, other=0).to(tl.float32)
    scaled = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / cols + epsilon)
    if ROUNDED:
        scaled = scaled.to(tl.bfloat16).to(tl.float32)
    if PLUS_ONE:
        factors += 1
    tl.store(out + row, (scaled * factors).to(tl.bfloat16), mask=inside)
