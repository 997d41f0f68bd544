"""The product of a matrix, whose planes are read as stored, with one row at a time: exact sums of integers per slab.

The numbers of x in a slab become 16-bit integers times a power of two (kernels.triton.fixed_point). Codes stay packed,
four to a word, and one instruction multiplies four of them with four bytes of x. Integers are added up exactly over a
slab, and scaled and added as float32 from slab to slab.

A thread holds the 16 bytes of one matrix row and slab of a plane, so a warp's loads are contiguous; x is converted once
per program. All loads of planes start before the program waits for x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from edgemoe.kernels.triton.fixed_point import dot_signed, dot_unsigned, fixed_point
from edgemoe.kernels.triton.products import Product, Tile, gated


@triton.jit
def matvec(items, x, x_stride, y, P: tl.constexpr, T: tl.constexpr):
    """Computes y[first row] = the matrix times x[first row], gated; a program takes an item and two blocks of rows.

    With a gating the blocks are the same T.rows rows of both halves, otherwise they are 2 T.rows rows in succession
    (`rows_per_program`). An item of level 0 leaves its row of y as it is.

    Args:
        items: int64 [programs along axis 1, ITEM].
        x: bf16 [R, P.cols].
        x_stride: elements from one row of x to the next; 0 where all items share a row.
        y: bf16 [R, P.out], or float32, which is not rounded.
        P: the Product.
        T: the Tile.
    """
    item = items + tl.program_id(1) * 8
    level, at = tl.load(item + 5), tl.load(item + 6)
    pairs, base = _address(item, 0), _address(item, 1)
    d4, even, odd = _address(item, 2), _address(item, 3), _address(item, 4)
    addresses = pairs, base, d4, even, odd
    if level == 2:
        multiply_rows(addresses, x + at * x_stride, y + at * P.out, P, T, 2)
    elif level == 4:
        multiply_rows(addresses, x + at * x_stride, y + at * P.out, P, T, 4)
    elif level == 8:
        multiply_rows(addresses, x + at * x_stride, y + at * P.out, P, T, 8)


def rows_per_program(product: Product, tile: Tile) -> int:
    """Elements of a row of y that a program computes."""
    return tile.rows * (2 if product.gating == "custom" else 1)


@triton.jit
def multiply_rows(addresses, x, y, P: tl.constexpr, T: tl.constexpr, LEVEL: tl.constexpr):
    """Computes a program's elements of a row of y, from five addresses of an item and a row of x."""
    SIDE: tl.constexpr = T.side  # before Triton 3.8 a shape takes no fields of T
    ROWS: tl.constexpr = T.rows
    PLAIN: tl.constexpr = P.gating == "custom"
    start = tl.program_id(0) * ROWS * (2 if PLAIN else 1)
    next_start = start + (ROWS if PLAIN else P.out)
    sums = tl.zeros((SIDE, ROWS), tl.float32)
    next_sums = tl.zeros((SIDE, ROWS), tl.float32)
    for first in range(0, P.slabs, T.side):
        slab = first + tl.arange(0, SIDE)
        planes = _planes(addresses, slab, start, P, T, LEVEL)
        next_planes = _planes(addresses, slab, next_start, P, T, LEVEL)
        words, steps, totals = _integers(x, slab, P, SIDE)
        parameters = _parameters(addresses, slab, start, P, T)
        next_parameters = _parameters(addresses, slab, next_start, P, T)
        sums += _slab_sums(planes, parameters, words, steps, totals, P, LEVEL)
        next_sums += _slab_sums(next_planes, next_parameters, words, steps, totals, P, LEVEL)
    done, next_done = tl.reduce((sums, next_sums), 0, _both)
    row = start + tl.arange(0, ROWS)
    if PLAIN:
        tl.store(y + row + ROWS, next_done.to(y.dtype.element_ty), mask=row + ROWS < P.out)
    else:
        done = gated(done, next_done, P)
    tl.store(y + row, done.to(y.dtype.element_ty), mask=row < P.out)


@triton.jit
def _both(sums, next_sums, more, more_next):
    """Adds two pairs, for one reduction of both blocks of rows."""
    return sums + more, next_sums + more_next


@triton.jit
def _address(item, WHICH: tl.constexpr):
    """The address of 32-bit words: planes and parameters start at multiples of 16 bytes, which allows loads of 16."""
    return tl.multiple_of(tl.load(item + WHICH).to(tl.pointer_type(tl.uint32)), 16)


@triton.jit
def _planes(addresses, slab, start, P: tl.constexpr, T: tl.constexpr, LEVEL: tl.constexpr):
    """Words of base, d4 and d8's halves, uint32 [side, rows, run / 4]; base stands in for planes above LEVEL."""
    WORDS: tl.constexpr = P.run // 4
    ROWS: tl.constexpr = T.rows
    SHAPE: tl.constexpr = (T.side, ROWS, WORDS)
    _, base, d4, even, odd = addresses
    word = start * WORDS + tl.arange(0, ROWS * WORDS)
    inside = (slab < P.slabs)[:, None] & (word < P.padded_rows * WORDS)[None, :]
    at = (slab * (P.padded_rows * WORDS))[:, None] + word[None, :]
    codes = tl.reshape(tl.load(base + at, mask=inside, other=0), SHAPE)
    fours = tl.reshape(tl.load(d4 + at, mask=inside, other=0), SHAPE) if LEVEL > 2 else codes
    evens = tl.reshape(tl.load(even + at, mask=inside, other=0), SHAPE) if LEVEL > 4 else codes
    odds = tl.reshape(tl.load(odd + at, mask=inside, other=0), SHAPE) if LEVEL > 4 else codes
    return codes, fours, evens, odds


@triton.jit
def _parameters(addresses, slab, start, P: tl.constexpr, T: tl.constexpr):
    """Scales and centres of both halves of slabs, uint32 [side, rows] each; one pair where the halves share a group."""
    SLAB: tl.constexpr = 4 * P.run
    ROWS: tl.constexpr = T.rows
    pairs, row = addresses[0], start + tl.arange(0, ROWS)
    inside = (slab < P.slabs)[:, None] & (row < P.padded_rows)[None, :]
    # One pair a thread, as the sums lie: wider loads would move the sums to other threads.
    group = (slab * SLAB // P.group)[:, None] * P.padded_rows + row[None, :]
    first = tl.load(pairs + group, mask=inside, other=0)
    if P.group == SLAB // 2:
        group += P.padded_rows
        return first, tl.load(pairs + group, mask=inside, other=0)
    return first, first


@triton.jit
def _integers(x, slab, P: tl.constexpr, SIDE: tl.constexpr):
    """Slabs of x as 16-bit integers times a step.

    Returns:
        Upper bytes (signed) of the runs 0 to 3, then lower bytes (unsigned), int32 [side, run / 4] each, four to a
        word; steps, float32 [side], NaN where x is not finite; sums of the integers of both halves, int32 [side] each,
        of which the first has the whole slab's where it lies in one group.
    """
    SLAB: tl.constexpr = 4 * P.run
    WORDS: tl.constexpr = P.run // 4
    column = slab[:, None] * SLAB + tl.arange(0, SLAB)[None, :]
    numbers = tl.load(x + column, mask=column < P.cols, other=0).to(tl.float32)
    high, low, steps = fixed_point(numbers, SIDE, SLAB)
    high, low = tl.reshape(high, (SIDE, 2, 2, WORDS)), tl.reshape(low, (SIDE, 2, 2, WORDS))
    ones = tl.full((SIDE, 2, 2, WORDS), 0x01010101, tl.int32)
    nothing = tl.zeros((SIDE, 2, 2, WORDS), tl.int32)
    each = (dot_signed(ones, high, nothing) << 8) + dot_unsigned(ones, low, nothing)
    if P.group < SLAB:
        totals = tl.split(tl.sum(tl.reshape(each, (SIDE, 2, 2 * WORDS)), 2))
    else:
        whole = tl.sum(tl.sum(tl.reshape(each, (SIDE, SLAB // 8, 2)), 2), 1)
        totals = whole, whole
    return _runs(high) + _runs(low), steps, totals


@triton.jit
def _runs(words):
    """[side, run / 4] of each run, from [side, 2, 2, run / 4]."""
    even, odd = tl.split(tl.permute(words, (0, 3, 1, 2)))
    run_0, run_2 = tl.split(even)
    run_1, run_3 = tl.split(odd)
    return run_0, run_1, run_2, run_3


@triton.jit
def _slab_sums(planes, parameters, words, steps, totals, P: tl.constexpr, LEVEL: tl.constexpr):
    """float32 [side, rows]: the products of matrix rows with x in slabs, scaled."""
    SLAB: tl.constexpr = 4 * P.run
    # A weight is scale * (FACTOR * code - ZERO) * UNIT + centre (storage.record.planes), with integers in brackets.
    FACTOR: tl.constexpr = 8 if LEVEL == 2 else (1 if LEVEL == 4 else 2)
    ZERO: tl.constexpr = 13 if LEVEL == 2 else (8 if LEVEL == 4 else 271)
    UNIT: tl.constexpr = 0.5 if LEVEL == 2 else (1.0 if LEVEL == 4 else 0.03125)
    high_0, high_1, high_2, high_3, low_0, low_1, low_2, low_3 = words
    code_0, code_1, code_2, code_3 = _codes(planes, LEVEL)
    early = _half_sums(code_0, code_1, high_0, high_1, low_0, low_1)
    late = _half_sums(code_2, code_3, high_2, high_3, low_2, low_3)
    if LEVEL < 8:
        late = late >> 4
    scale, centre = _scale_and_centre(parameters[0])
    unit = (steps * UNIT)[:, None]
    if P.group < SLAB:
        sums = _scaled(early * FACTOR - totals[0][:, None] * ZERO, totals[0], unit, steps, scale, centre)
        scale, centre = _scale_and_centre(parameters[1])
        return sums + _scaled(
            late * FACTOR - totals[1][:, None] * ZERO, totals[1], unit, steps, scale, centre
        )
    return _scaled((early + late) * FACTOR - totals[0][:, None] * ZERO, totals[0], unit, steps, scale, centre)


@triton.jit
def _scaled(sums, total, unit, steps, scale, centre):
    """float32 [side, rows], from integer sums of codes times x, and of x."""
    return sums.to(tl.float32) * unit * scale + (total.to(tl.float32) * steps)[:, None] * centre


@triton.jit
def _scale_and_centre(pair):
    """Scale and centre as float32, from bf16 pairs in words."""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _half_sums(codes, more_codes, high, more_high, low, more_low):
    """int32 [side, rows]: the sums of two runs of codes times x."""
    nothing = tl.zeros(codes.shape, tl.int32)
    highs = dot_signed(more_codes, more_high[:, None, :], dot_signed(codes, high[:, None, :], nothing))
    lows = dot_unsigned(more_codes, more_low[:, None, :], dot_unsigned(codes, low[:, None, :], nothing))
    return (tl.sum(highs, 2) << 8) + tl.sum(lows, 2)


@triton.jit
def _codes(planes, LEVEL: tl.constexpr):
    """Codes of the runs 0 to 3, a byte each: uint32 [side, rows, run / 4]. Below level 8 runs 2 and 3 are times 16."""
    base, d4, even, odd = planes
    if LEVEL == 2:
        odds = base >> 2
        return base & 0x03030303, odds & 0x03030303, base & 0x30303030, odds & 0x30303030
    evens = ((base << 2) & 0xCCCCCCCC) | (d4 & 0x33333333)
    odds = (base & 0xCCCCCCCC) | ((d4 >> 2) & 0x33333333)
    if LEVEL == 4:
        return evens & 0x0F0F0F0F, odds & 0x0F0F0F0F, evens & 0xF0F0F0F0, odds & 0xF0F0F0F0
    run_0 = ((evens << 4) & 0xF0F0F0F0) | (even & 0x0F0F0F0F)
    run_1 = ((odds << 4) & 0xF0F0F0F0) | (odd & 0x0F0F0F0F)
    run_2 = (evens & 0xF0F0F0F0) | ((even >> 4) & 0x0F0F0F0F)
    run_3 = (odds & 0xF0F0F0F0) | ((odd >> 4) & 0x0F0F0F0F)
    return run_0, run_1, run_2, run_3
