"""Triton kernels: products with matrices whose planes are read as stored, in the layout cuda of storage.record.layout.

`matvec` (kernels.triton.matvec) serves few tokens and `matmul` many. A launch computes a list of items. An item has its
own planes, level and rows of x, so a launch mixes experts and levels. An item is ITEM int64 numbers:

    addresses of parameters, base's codes, d4, d8's first half, d8's second half | level | first row of x | rows

matvec: an item is one row of x.
matmul: weights are dequantized in registers to bf16 and multiplied by tl.dot, with float32 sums.

The order of a row's sum depends on the matrix's shape and the kernel only. With a gating, both halves of a gate_up
matrix are multiplied and gated in the same program, rounded where transformers rounds. Masks keep every load inside
its matrix; the caller guarantees that the addresses are valid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

ITEM = 8
"""Numbers per item. The kernels repeat the literal, since they see no globals."""


OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}
"""Options of every launch. Fused multiply-adds are explicit, since Triton's default differs by version."""


@dataclass(frozen=True)
class Product:
    """The compile-time constants of a launch: the matrix and the gating of its products.

    Args:
        out: elements per row of y: the matrix's rows before padding, or half of them with a gating.
        cols: the matrix's columns before padding.
        padded_rows: the matrix's rows after padding.
        slabs: the matrix's slabs.
        run: columns per run, a quarter of a slab: 8 or 16.
        group: columns that share a scale, a multiple of 32.
        gating: function of the halves h and u: custom (not fused), silu (silu(h) u), gelu, or gelu_tanh (gelu's
            approximation).
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
    """The tile of a program.

    Args:
        rows: rows of the matrix; 8 for matvec, whose threads then share the work without exchanging it.
        side: slabs in parallel, for matvec; 4 for each warp.
        tokens: rows of x, for matmul; at least 16.
        warps: the number of warps of a program.
    """

    rows: int
    side: int = 1
    tokens: int = 1
    warps: int = 4


@triton.jit
def matmul(items, x, x_stride, y, P: tl.constexpr, T: tl.constexpr, OPERAND: tl.constexpr):
    """Computes the products of items of up to T.tokens consecutive rows of x; arguments as in `matvec`.

    Args:
        OPERAND: the type that tl.dot multiplies: bfloat16, or float32 in the interpreter, which has no bf16.
    """
    item = items + tl.program_id(1) * 8
    level, at, rows = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    token, row = tl.arange(0, T.tokens)[:, None], tl.program_id(0) * T.rows + tl.arange(0, T.rows)
    x_rows, valid = x + (at + token) * x_stride, token < rows
    if level == 2:
        sums = _tile(item, x_rows, valid, row, P, T, OPERAND, 2)
    elif level == 4:
        sums = _tile(item, x_rows, valid, row, P, T, OPERAND, 4)
    else:
        sums = _tile(item, x_rows, valid, row, P, T, OPERAND, 8)
    out = y + (at + token) * P.out + row[None, :]
    tl.store(out, sums.to(tl.bfloat16), mask=valid & (row[None, :] < P.out))


@triton.jit
def _tile(item, x, valid, row, P: tl.constexpr, T: tl.constexpr, OPERAND: tl.constexpr, LEVEL: tl.constexpr):
    """float32 [T.tokens, T.rows]: the elements `row` of the valid rows of y."""
    sums = _tile_half(item, x, valid, row, P, T, OPERAND, LEVEL)
    if P.gating != "custom":
        sums = gated(sums, _tile_half(item, x, valid, row + P.out, P, T, OPERAND, LEVEL), P)
    return sums


@triton.jit
def _tile_half(
    item, x, valid, row, P: tl.constexpr, T: tl.constexpr, OPERAND: tl.constexpr, LEVEL: tl.constexpr
):
    """float32 [T.tokens, T.rows]: x times the matrix's rows `row`. tl.dot requires 16 lanes, of which run are used."""
    SLAB: tl.constexpr = 4 * P.run
    SHARED: tl.constexpr = P.group if P.group < SLAB else SLAB
    TOKENS: tl.constexpr = T.tokens  # as in _vector_half
    ROWS: tl.constexpr = T.rows
    sums = tl.zeros((TOKENS, ROWS), tl.float32)
    lane = tl.arange(0, 16)[None, :]
    inside = (row[:, None] < P.padded_rows) & (lane < P.run)
    for slab in range(P.slabs):
        planes = _load(item, (slab * P.padded_rows + row[:, None]) * P.run + lane, inside, LEVEL)
        for run in tl.static_range(4):
            if run * P.run % SHARED == 0:
                index = (slab * SLAB + run * P.run) // P.group * P.padded_rows + row
                scale, centre = _scale_and_centre(item, index, row < P.padded_rows)
            column = slab * SLAB + run * P.run + lane
            x_run = tl.load(x + column, mask=valid & (column < P.cols) & (lane < P.run), other=0)
            weights = _codes(planes, run, LEVEL) * scale[:, None] + centre[:, None]
            weights = weights.to(tl.bfloat16).to(OPERAND)
            sums = tl.dot(x_run.to(OPERAND), tl.trans(weights), sums)
    return sums


@triton.jit
def _load(item, at, inside, LEVEL: tl.constexpr):
    """uint8 tiles of base, d4 and d8's halves; base stands in for unused planes above LEVEL."""
    base = _plane(item, 1, at, inside)
    d4 = _plane(item, 2, at, inside) if LEVEL > 2 else base
    even = _plane(item, 3, at, inside) if LEVEL > 4 else base
    odd = _plane(item, 4, at, inside) if LEVEL > 4 else base
    return base, d4, even, odd


@triton.jit
def _plane(item, WHICH: tl.constexpr, at, inside):
    """A plane's bytes. Planes start at multiples of 16 bytes, which allows loads of 16."""
    plane = tl.multiple_of(tl.load(item + WHICH).to(tl.pointer_type(tl.uint8)), 16)
    return tl.load(plane + at, mask=inside, other=0)


@triton.jit
def _scale_and_centre(item, index, inside):
    """Scale and centre as float32, from a bf16 pair that is loaded as one word."""
    pairs = tl.multiple_of(tl.load(item).to(tl.pointer_type(tl.uint32)), 16)
    word = tl.load(pairs + index, mask=inside, other=0)
    return (word << 16).to(tl.float32, bitcast=True), (word & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _codes(planes, RUN: tl.constexpr, LEVEL: tl.constexpr):
    """A run's codes in units of the stored scale, relative to the centre (storage.record.planes): float32, exact."""
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
def gated(half, up, P: tl.constexpr):
    """float32: the gating of half and up, rounded to bf16 where the model rounds."""
    h = half.to(tl.bfloat16).to(tl.float32)
    if P.gating == "silu":
        h = h * tl.sigmoid(h)
    elif P.gating == "gelu":
        h = 0.5 * h * (1 + tl.erf(h * 0.7071067811865476))
    else:
        h = h * tl.sigmoid(1.5957691216057308 * (h + 0.044715 * h * h * h))
    return h.to(tl.bfloat16).to(tl.float32) * up.to(tl.bfloat16).to(tl.float32)
