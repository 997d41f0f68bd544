"""Triton: products with matrices whose planes are read as they lie, in the layout cuda of storage.layout.

Two kernels, `matvec` for few tokens and `matmul` for many. A launch computes a list of items, each with planes, level
and rows of x of its own, so experts at different levels go together. An item is ITEM numbers (int64):

    addresses of parameters, base's codes, d4, d8's first half, d8's second half | level | first row of x | rows

matvec: an item is one row of x. A thread loads 16 bytes of a plane, one matrix row's codes in one slab, and adds up
their products by itself; what a warp loads is contiguous. `side` slabs are added up side by side.
matmul: weights are dequantized in registers to bf16 and multiplied by tl.dot, with sums in float32.

The order of a row's sum follows from the matrix's shape and the kernel, and from nothing else. With a gating both
halves of a gate_up matrix are multiplied, and gated where they are: rounded where transformers' own code rounds.
Masks keep every load inside its matrix; that the addresses hold one is the caller's affair.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

ITEM = 8
"""Numbers of an item. Written out in the kernels, which see no globals."""


@dataclass(frozen=True)
class Product:
    """What a launch is compiled for: the matrix, and what becomes of its products.

    Args:
        out: elements of a row of y: the matrix's rows before padding, or half of them with a gating.
        cols: the matrix's columns before padding.
        padded_rows: of the matrix.
        slabs: of the matrix.
        run: columns of a run, a quarter of a slab: 8 or 16.
        group: columns that share a scale, a multiple of 32.
        gating: of both halves h, u: custom (not fused), silu (silu(h) u), gelu, or gelu_tanh (gelu's approximation).
    """

    out: int
    cols: int
    padded_rows: int
    slabs: int
    run: int
    group: int
    gating: str


@dataclass(frozen=True)
class Tile:
    """What a program computes at a time.

    Args:
        rows: of the matrix.
        side: matvec: slabs.
        tokens: matmul: rows of x, at least 16.
    """

    rows: int
    side: int = 1
    tokens: int = 1


@triton.jit
def matvec(items, x, x_stride, y, P: tl.constexpr, T: tl.constexpr):
    """y[first row] = the matrix times x[first row], gated; an item and T.rows rows of the matrix a program.

    Args:
        items: int64 [programs along axis 1, ITEM].
        x: bf16 rows of P.cols.
        x_stride: elements between them; 0 where all items share a row.
        y: bf16 rows of P.out.
        P: the Product.
        T: the Tile.
    """
    item = items + tl.program_id(1) * 8
    level, at = tl.load(item + 5), tl.load(item + 6)
    row = tl.program_id(0) * T.rows + tl.arange(0, T.rows)
    if level == 2:
        sums = _vector(item, x + at * x_stride, row, P, T, 2)
    elif level == 4:
        sums = _vector(item, x + at * x_stride, row, P, T, 4)
    else:
        sums = _vector(item, x + at * x_stride, row, P, T, 8)
    tl.store(y + at * P.out + row, sums.to(tl.bfloat16), mask=row < P.out)


@triton.jit
def matmul(items, x, x_stride, y, P: tl.constexpr, T: tl.constexpr, OPERAND: tl.constexpr):
    """The same for items of up to T.tokens consecutive rows of x.

    OPERAND is what tl.dot multiplies: bfloat16, or float32 where it runs in the interpreter, which has no bf16.
    """
    item = items + tl.program_id(1) * 8
    level, at, rows = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    token, row = tl.arange(0, T.tokens)[:, None], tl.program_id(0) * T.rows + tl.arange(0, T.rows)
    mine, there = x + (at + token) * x_stride, token < rows
    if level == 2:
        sums = _tile(item, mine, there, row, P, T, OPERAND, 2)
    elif level == 4:
        sums = _tile(item, mine, there, row, P, T, OPERAND, 4)
    else:
        sums = _tile(item, mine, there, row, P, T, OPERAND, 8)
    out = y + (at + token) * P.out + row[None, :]
    tl.store(out, sums.to(tl.bfloat16), mask=there & (row[None, :] < P.out))


@triton.jit
def _vector(item, x, row, P: tl.constexpr, T: tl.constexpr, LEVEL: tl.constexpr):
    """float32 [T.rows]: rows `row` of y, one row of x's."""
    sums = _vector_half(item, x, row, P, T, LEVEL)
    if P.gating != "custom":
        sums = _gated(sums, _vector_half(item, x, row + P.out, P, T, LEVEL), P)
    return sums


@triton.jit
def _vector_half(item, x, row, P: tl.constexpr, T: tl.constexpr, LEVEL: tl.constexpr):
    """float32 [T.rows]: the matrix's rows `row` times x."""
    SLAB: tl.constexpr = 4 * P.run
    SHARED: tl.constexpr = P.group if P.group < SLAB else SLAB
    sums = tl.zeros((T.side, T.rows), tl.float32)
    lane, across = tl.arange(0, P.run), row[None, :]
    for first in range(0, P.slabs, T.side):
        slab = (first + tl.arange(0, T.side))[:, None]
        inside = (slab < P.slabs) & (across < P.padded_rows)
        at = (slab * P.padded_rows + across)[:, :, None] * P.run + lane[None, None, :]
        planes = _load(item, at, inside[:, :, None], LEVEL)
        for run in tl.static_range(4):
            if run * P.run % SHARED == 0:
                index = (slab * SLAB + run * P.run) // P.group * P.padded_rows + across
                scale, centre = _scale_and_centre(item, index, inside)
            column = slab * SLAB + run * P.run + lane[None, :]
            part = tl.load(x + column, mask=column < P.cols, other=0).to(tl.float32)
            products = tl.sum(_codes(planes, run, LEVEL) * part[:, None, :], 2)
            sums += scale * products + centre * tl.sum(part, 1)[:, None]
    return tl.sum(sums, 0)


@triton.jit
def _tile(
    item,
    x,
    there,
    row,
    P: tl.constexpr,
    T: tl.constexpr,
    OPERAND: tl.constexpr,
    LEVEL: tl.constexpr,
):
    """float32 [T.tokens, T.rows]: columns `row` of y, of the rows of x that are there."""
    sums = _tile_half(item, x, there, row, P, T, OPERAND, LEVEL)
    if P.gating != "custom":
        sums = _gated(sums, _tile_half(item, x, there, row + P.out, P, T, OPERAND, LEVEL), P)
    return sums


@triton.jit
def _tile_half(
    item,
    x,
    there,
    row,
    P: tl.constexpr,
    T: tl.constexpr,
    OPERAND: tl.constexpr,
    LEVEL: tl.constexpr,
):
    """float32 [T.tokens, T.rows]: x times the matrix's rows `row`. tl.dot wants 16 lanes, used or not."""
    SLAB: tl.constexpr = 4 * P.run
    SHARED: tl.constexpr = P.group if P.group < SLAB else SLAB
    sums = tl.zeros((T.tokens, T.rows), tl.float32)
    lane = tl.arange(0, 16)[None, :]
    inside = (row[:, None] < P.padded_rows) & (lane < P.run)
    for slab in range(P.slabs):
        planes = _load(item, (slab * P.padded_rows + row[:, None]) * P.run + lane, inside, LEVEL)
        for run in tl.static_range(4):
            if run * P.run % SHARED == 0:
                index = (slab * SLAB + run * P.run) // P.group * P.padded_rows + row
                scale, centre = _scale_and_centre(item, index, row < P.padded_rows)
            column = slab * SLAB + run * P.run + lane
            part = tl.load(x + column, mask=there & (column < P.cols) & (lane < P.run), other=0)
            weights = _codes(planes, run, LEVEL) * scale[:, None] + centre[:, None]
            weights = weights.to(tl.bfloat16).to(OPERAND)
            sums = tl.dot(part.to(OPERAND), tl.trans(weights), sums)
    return sums


@triton.jit
def _load(item, at, inside, LEVEL: tl.constexpr):
    """uint8 tiles of base, d4 and d8's halves; what is above LEVEL is base again, and not used."""
    base = _plane(item, 1, at, inside)
    d4 = _plane(item, 2, at, inside) if LEVEL > 2 else base
    even = _plane(item, 3, at, inside) if LEVEL > 4 else base
    odd = _plane(item, 4, at, inside) if LEVEL > 4 else base
    return base, d4, even, odd


@triton.jit
def _plane(item, WHICH: tl.constexpr, at, inside):
    """A plane's bytes. It lies on a multiple of 16 bytes, which is what makes loads of 16 possible."""
    plane = tl.multiple_of(tl.load(item + WHICH).to(tl.pointer_type(tl.uint8)), 16)
    return tl.load(plane + at, mask=inside, other=0)


@triton.jit
def _scale_and_centre(item, index, inside):
    """Both as float32, from a bf16 pair that is loaded as one word."""
    pairs = tl.multiple_of(tl.load(item).to(tl.pointer_type(tl.uint32)), 16)
    word = tl.load(pairs + index, mask=inside, other=0)
    return (word << 16).to(tl.float32, bitcast=True), (word & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _codes(planes, RUN: tl.constexpr, LEVEL: tl.constexpr):
    """One run's codes in units of the stored scale, from the centre (storage.planes): float32, exact."""
    base, d4, even, odd = planes
    codes = (base >> (2 * RUN)) & 3
    if LEVEL == 2:
        return codes.to(tl.float32) * 4 - 6.5
    codes = (codes << 2) | ((d4 >> (2 * RUN)) & 3)
    if LEVEL == 4:
        return codes.to(tl.float32) - 8
    low = (even if RUN % 2 == 0 else odd) >> (4 * (RUN // 2))
    return ((codes << 4) | (low & 15)).to(tl.float32) * 0.0625 - 8.46875


@triton.jit
def _gated(half, up, P: tl.constexpr):
    """float32 of a model's gating in bf16."""
    h = half.to(tl.bfloat16).to(tl.float32)
    if P.gating == "silu":
        h = h * tl.sigmoid(h)
    elif P.gating == "gelu":
        h = 0.5 * h * (1 + tl.erf(h * 0.7071067811865476))
    else:
        h = h * tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))
    return h.to(tl.bfloat16).to(tl.float32) * up.to(tl.bfloat16).to(tl.float32)
