"""Products and norms of one new token, whose weights are read once: kernels that a graph can hold.

No kernel allocates, and no argument changes from token to token, so that a device captures them once and launches them
again. Sums are float32 in a fixed order; results are rounded to bf16 where transformers' modules round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.dense_groups import multiply_grouped
from edgemoe.kernels.triton.fixed_point import dot_weights, fixed_point
from edgemoe.kernels.triton.products import OPTIONS

ROWS, COLS = 2, 1024
"""Rows of a matrix per program of `gemv`, and columns that it loads at a time (docs/benchmarks/2026-11-23-gpu.md)."""

INTEGER_ROWS = 4
"""Times ROWS: rows per program of weights of 8 bits, which are multiplied as integers."""

NORM_WARPS = 8
"""Warps of the one program of add_norm."""

MOST_MATRICES = 3


@dataclass(frozen=True)
class Matrix:
    """A linear layer.

    Args:
        weight: bf16 [N, K], int8 [N, K] with the scale, or uint8 of 4 to 6 bits (storage.store.dense_groups);
            contiguous, on the device.
        scale: bf16 [N]; None: the weight is not int8.
        bias: bf16 [N], or None.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def multiply(x: torch.Tensor, matrices: Sequence[Matrix], out: torch.Tensor) -> None:
    """Launches the products of one row with up to MOST_MATRICES matrices, as layers.dense.DenseLinear computes them.

    Args:
        x: bf16 [K], contiguous.
        matrices: matrices with K columns each, all of one type and number of bits, all with a bias or all without.
        out: bf16, as many elements as the matrices have rows: the products one after another.
    """
    if matrices[0].weight.dtype == torch.uint8:
        multiply_grouped(x, [(matrix.weight, matrix.bias) for matrix in matrices], out)
        return
    arguments: list[torch.Tensor | int | None] = []
    for matrix in matrices:
        arguments += [matrix.weight, matrix.scale, matrix.bias, len(matrix.weight)]
    arguments += [None, None, None, 0] * (MOST_MATRICES - len(matrices))
    cols = matrices[0].weight.shape[1]
    integers = matrices[0].scale is not None and cols % 4 == 0
    tile = (INTEGER_ROWS * ROWS, max(COLS, 64)) if integers else (ROWS, COLS)
    blocks = sum(triton.cdiv(len(matrix.weight), tile[0]) for matrix in matrices)
    gemv[(blocks,)](*arguments, x, out, cols, *tile, integers, **OPTIONS)


def add_and_normalise(
    rows: torch.Tensor | None,
    gates: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    normed: torch.Tensor,
) -> None:
    """Launches hidden += sum of gates[i] rows[i], in the order of i, and normed = the RMS norm of hidden.

    Args:
        rows: bf16 [k, H]; None: hidden stays as it is.
        gates: float32 [k]; a row whose gate weight is 0 is not read.
        hidden: bf16 [H], changed in place.
        weight: bf16 [H].
        epsilon: the epsilon of the norm.
        normed: bf16 [H], the result.
    """
    size = hidden.numel()
    count = 0 if rows is None else rows.numel() // size
    add_norm[(1,)](
        *(rows, gates, hidden, weight, normed, size, epsilon, count, triton.next_power_of_2(size)),
        num_warps=NORM_WARPS,
        **OPTIONS,
    )


@triton.jit
def gemv(
    w0,
    s0,
    b0,
    n0,
    w1,
    s1,
    b1,
    n1,
    w2,
    s2,
    b2,
    n2,
    x,
    y,
    cols,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INTEGERS: tl.constexpr,
):
    """y = the products of up to three matrices w [n, cols], scales s and biases b with x; a program takes ROWS rows.

    With INTEGERS weights are multiplied four at a time; cols is a multiple of 4, COLS of 64.
    """
    block = tl.program_id(0)
    blocks = tl.cdiv(n0, ROWS)
    if block < blocks:
        _rows(w0, s0, b0, n0, x, y, cols, block, ROWS, COLS, INTEGERS)
    elif w1 is not None:
        block -= blocks
        blocks = tl.cdiv(n1, ROWS)
        if block < blocks:
            _rows(w1, s1, b1, n1, x, y + n0, cols, block, ROWS, COLS, INTEGERS)
        elif w2 is not None:
            _rows(w2, s2, b2, n2, x, y + n0 + n1, cols, block - blocks, ROWS, COLS, INTEGERS)


@triton.jit
def _rows(
    weight,
    scale,
    bias,
    count,
    x,
    y,
    cols,
    block,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INTEGERS: tl.constexpr,
):
    row = block * ROWS + tl.arange(0, ROWS)
    inside = row < count
    if INTEGERS:
        total = _integer_sums(weight, x, cols, row, inside, ROWS, COLS)
    else:
        total = _sums(weight, x, cols, row, inside, ROWS, COLS)
    if scale is not None:
        total *= tl.load(scale + row, mask=inside, other=0).to(tl.float32)
    if bias is not None:
        total = total.to(tl.bfloat16).to(tl.float32)
        total += tl.load(bias + row, mask=inside, other=0).to(tl.float32)
    tl.store(y + row, total.to(tl.bfloat16), mask=inside)


@triton.jit
def _sums(weight, x, cols, row, inside, ROWS: tl.constexpr, COLS: tl.constexpr):
    """float32 [ROWS]: products of rows with x."""
    first = weight + row.to(tl.int64)[:, None] * cols
    sums = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, cols, COLS):
        column = start + tl.arange(0, COLS)
        valid = column < cols
        weights = tl.load(first + column[None, :], mask=inside[:, None] & valid[None, :], other=0)
        numbers = tl.load(x + column, mask=valid, other=0).to(tl.float32)
        sums += weights.to(tl.float32) * numbers[None, :]
    return tl.sum(sums, 1)


@triton.jit
def _integer_sums(weight, x, cols, row, inside, ROWS: tl.constexpr, COLS: tl.constexpr):
    """float32 [ROWS]: products of rows with x, whose slabs of 64 columns become integers; four weights are a word."""
    SIDE: tl.constexpr = COLS // 64
    words = cols // 4
    first = weight.to(tl.pointer_type(tl.uint32)) + row.to(tl.int64)[:, None] * words
    sums = tl.zeros((ROWS, SIDE, 16), tl.float32)
    for start in range(0, cols, COLS):
        word = start // 4 + tl.arange(0, COLS // 4)
        weights = tl.load(first + word[None, :], mask=inside[:, None] & (word < words)[None, :], other=0)
        column = start + tl.arange(0, SIDE)[:, None] * 64 + tl.arange(0, 64)[None, :]
        numbers = tl.load(x + column, mask=column < cols, other=0).to(tl.float32)
        high, low, steps = fixed_point(numbers, SIDE, 64)
        products = dot_weights(tl.reshape(weights, (ROWS, SIDE, 16)), high[None, :, :], low[None, :, :])
        sums += products.to(tl.float32) * steps[None, :, None]
    return tl.sum(tl.reshape(sums, (ROWS, SIDE * 16)), 1)


@triton.jit
def add_norm(rows, gates, hidden, weight, normed, size, epsilon, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """One program: see add_and_normalise."""
    at = tl.arange(0, SIZE)
    inside = at < size
    own = tl.load(hidden + at, mask=inside, other=0).to(tl.float32)
    if COUNT > 0:
        total = tl.zeros((SIZE,), tl.float32)
        for slot in tl.static_range(COUNT):
            gate = tl.load(gates + slot)
            row = tl.load(rows + slot * size + at, mask=tl.where(gate != 0, inside, False), other=0)
            total += gate * row.to(tl.float32)
        own = (own + total.to(tl.bfloat16).to(tl.float32)).to(tl.bfloat16)
        tl.store(hidden + at, own, mask=inside)
        own = own.to(tl.float32)
    scaled = own * tl.rsqrt(tl.sum(own * own, 0) / size + epsilon)
    weights = tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    tl.store(normed + at, (scaled.to(tl.bfloat16).to(tl.float32) * weights).to(tl.bfloat16), mask=inside)
