"""Products with dense matrices of 4 to 6 bits, whose bytes are read as they lie (storage.store.dense_groups).

`grouped_gemv` multiplies one row, and a graph can hold it. Codes stay packed. A thread has the bytes of four matrix
rows and of the four rows 16 further on, in two of each four columns, and makes words of four columns of a row from
them. An instruction multiplies such a word with four bytes of x, whose numbers are integers times a step per group
(kernels.triton.fixed_point). Integers are added up exactly over half of a group, and scaled and added as float32 from
group to group.

Products of more rows take weights that kernels.triton.decode_groups writes as bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.fixed_point import bytes_of, dot_signed, dot_unsigned, fixed_point
from edgemoe.kernels.triton.products import OPTIONS
from edgemoe.storage.store.dense_groups import columns_of
from edgemoe.storage.store.dense_shapes import GROUP, ROWS, bits_of

MOST_SIDE = 32
"""Most groups that a program of `grouped_gemv` multiplies at a time; four take a warp."""


def multiply_grouped(
    x: torch.Tensor, matrices: Sequence[tuple[torch.Tensor, torch.Tensor | None]], out: torch.Tensor
) -> None:
    """Launches the products of one row with one to three matrices of equal bits.

    Args:
        x: bf16 [K], contiguous.
        matrices: weights, uint8 of dense_shapes.stored_shape with K columns each, and biases, bf16 [N]; None: no bias.
        out: bf16, as many elements as the matrices have rows.
    """
    arguments: list[torch.Tensor | int | None] = []
    for weight, bias in matrices:
        arguments += [weight, bias, len(weight)]
    arguments += [None, None, 0] * (3 - len(matrices))
    first = matrices[0][0]
    bits, groups = bits_of(tuple(first.shape)), columns_of(first) // GROUP
    side = min(MOST_SIDE, triton.next_power_of_2(groups))
    blocks = sum(len(weight) // ROWS for weight, _ in matrices)
    options = OPTIONS | {"num_warps": max(side // 4, 1)}
    grouped_gemv[(blocks,)](*arguments, x, out, groups, bits, side, **options)


@triton.jit
def grouped_gemv(w0, b0, n0, w1, b1, n1, w2, b2, n2, x, y, groups, BITS: tl.constexpr, SIDE: tl.constexpr):
    """y = the products of up to three matrices w [n, 64 groups] and biases b with x; a program takes 32 rows.

    SIDE groups, a power of two, are multiplied at a time.
    """
    block = tl.program_id(0)
    if block < n0 // 32:
        _block_rows(w0, b0, n0, x, y, groups, block, BITS, SIDE)
    elif w1 is not None:
        block -= n0 // 32
        if block < n1 // 32:
            _block_rows(w1, b1, n1, x, y + n0, groups, block, BITS, SIDE)
        elif w2 is not None:
            _block_rows(w2, b2, n2, x, y + n0 + n1, groups, block - n1 // 32, BITS, SIDE)


@triton.jit
def _block_rows(weight, bias, count, x, y, groups, block, BITS: tl.constexpr, SIDE: tl.constexpr):
    """Computes 32 rows. Lanes are [2, 4]: the first or second column of a pair, and four of the rows 0 to 15."""
    lane = tl.arange(0, 8)
    row = block * 32 + 4 * (lane % 4)
    sums = tl.zeros((SIDE, 8, 2, 2), tl.float32)
    later_sums = tl.zeros((SIDE, 8, 2, 2), tl.float32)
    for first in range(0, groups, SIDE):
        group = first + tl.arange(0, SIDE)
        planes = _planes(weight, count, groups, block, group, lane, BITS)
        high, low, steps, totals = _integers(x, group, groups, SIDE)
        early, late = _sums(planes, high, low, lane, BITS, SIDE)
        sums += _scaled(early, totals, steps, weight, count, row, group, groups, BITS)
        later_sums += _scaled(late, totals, steps, weight, count, row + 16, group, groups, BITS)
    first_row = block * 32 + tl.arange(0, 16)
    _store(_across(sums, SIDE), bias, y, first_row)
    _store(_across(later_sums, SIDE), bias, y, first_row + 16)


@triton.jit
def _store(total, bias, y, row):
    """Stores products float32 [16] of rows, and adds the bias to what bf16 has of them."""
    if bias is not None:
        total = total.to(tl.bfloat16).to(tl.float32) + tl.load(bias + row).to(tl.float32)
    tl.store(y + row, total.to(tl.bfloat16))


@triton.jit
def _across(sums, SIDE: tl.constexpr):
    """float32 [16]: the sums of rows over groups and columns."""
    return tl.reshape(tl.sum(tl.sum(tl.reshape(sums, (SIDE, 2, 4, 2, 2)), 0), 0), (16,))


@triton.jit
def _planes(weight, count, groups, block, group, lane, BITS: tl.constexpr):
    """Words of planes, uint32 [side, 8] each.

    Per 8 columns there are two of base and two of d4, and of the bits after these two for 5 bits, four for 6.
    """
    words = weight.to(tl.pointer_type(tl.uint32))
    base = words + count * groups
    d4 = base + 4 * count * groups
    rest = d4 + 4 * count * groups
    inside = (group < groups)[:, None] & (lane < 8)[None, :]
    at = ((block * groups + group) * 128)[:, None] + lane[None, :]
    # The rest of rows 8 to 15 lies in the words of rows 0 to 7, in other bits.
    low = ((block * groups + group) * (64 * (BITS - 4)))[:, None] + (lane // 4 * 4 + lane % 2 * 2)[None, :]
    upper, later = (base + at, d4 + at), rest + low
    planes = _eight_columns(upper, later, inside, 0, BITS)
    for pair in tl.static_range(1, 8):
        planes = planes + _eight_columns(upper, later, inside, pair, BITS)
    return planes


@triton.jit
def _eight_columns(upper, later, inside, PAIR: tl.constexpr, BITS: tl.constexpr):
    """The words of `_planes` that have the columns from 8 PAIR on."""
    base, d4 = upper[0] + 16 * PAIR, upper[1] + 16 * PAIR
    words = _both(base, d4, inside) + _both(base + 8, d4 + 8, inside)
    for step in tl.static_range(BITS - 4):
        rest = later + 8 * ((BITS - 4) * PAIR + step)
        words = words + _both(rest, rest + 1, inside)
    return words


@triton.jit
def _both(pointers, more, inside):
    """The words of two blocks of pointers."""
    return tl.load(pointers, mask=inside, other=0), tl.load(more, mask=inside, other=0)


@triton.jit
def _integers(x, group, groups, SIDE: tl.constexpr):
    """Groups of x as integers.

    Returns:
        Upper bytes (signed) and lower bytes (unsigned) of four columns to a word, int32 [SIDE, 8] for each 8 columns: a
        word of lanes 0 to 3 has the even ones, of lanes 4 to 7 the odd ones. Steps, float32 [SIDE, 8], NaN where x is
        not finite; sums of the integers of a lane's columns, int32 [SIDE, 8].
    """
    column = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    numbers = tl.load(x + column, mask=(group < groups)[:, None], other=0).to(tl.float32)
    parted = tl.permute(tl.reshape(numbers, (SIDE, 8, 4, 2)), (0, 3, 1, 2))
    high, low, steps = fixed_point(tl.reshape(parted, (SIDE, 64)), SIDE, 64)
    ones = tl.full((SIDE, 16), 0x01010101, tl.int32)
    nothing = tl.zeros((SIDE, 16), tl.int32)
    each = (dot_signed(ones, high, nothing) << 8) + dot_unsigned(ones, low, nothing)
    totals = _lanes(tl.sum(tl.reshape(each, (SIDE, 2, 8)), 2), SIDE)
    steps = tl.broadcast_to(steps[:, None], (SIDE, 8))
    return _eighths(high, SIDE), _eighths(low, SIDE), steps, totals


@triton.jit
def _eighths(words, SIDE: tl.constexpr):
    """int32 [SIDE, 8] of each 8 columns, from words [SIDE, 16] of the even columns and then of the odd ones."""
    even, odd = tl.split(tl.reshape(words, (SIDE, 2, 2, 2, 2)))
    even_0, even_1 = tl.split(even)
    odd_0, odd_1 = tl.split(odd)
    pair_0, pair_4 = tl.split(even_0)
    pair_2, pair_6 = tl.split(even_1)
    pair_1, pair_5 = tl.split(odd_0)
    pair_3, pair_7 = tl.split(odd_1)
    return (
        _lanes(pair_0, SIDE),
        _lanes(pair_1, SIDE),
        _lanes(pair_2, SIDE),
        _lanes(pair_3, SIDE),
        _lanes(pair_4, SIDE),
        _lanes(pair_5, SIDE),
        _lanes(pair_6, SIDE),
        _lanes(pair_7, SIDE),
    )


@triton.jit
def _lanes(numbers, SIDE: tl.constexpr):
    """[SIDE, 8] from [SIDE, 2]: lanes 0 to 3 have the first number, lanes 4 to 7 the second."""
    return tl.reshape(tl.broadcast_to(numbers[:, :, None], (SIDE, 2, 4)), (SIDE, 8))


@triton.jit
def _sums(planes, high, low, lane, BITS: tl.constexpr, SIDE: tl.constexpr):
    """int32 [SIDE, 8, 2, 2]: the sums of codes times x of a lane's columns, for four rows and for the rows 16 later."""
    EACH: tl.constexpr = 2 * BITS - 4
    highs = tl.zeros((SIDE, 8, 2, 2), tl.int32)
    lows = tl.zeros((SIDE, 8, 2, 2), tl.int32)
    late_highs = tl.zeros((SIDE, 8, 2, 2), tl.int32)
    late_lows = tl.zeros((SIDE, 8, 2, 2), tl.int32)
    shift = (lane % 4 // 2 * (BITS - 4))[None, :]
    for pair in tl.static_range(8):
        rows = _nibbles(
            planes[pair * EACH], planes[pair * EACH + 1], planes[pair * EACH + 2], planes[pair * EACH + 3]
        )
        if BITS == 4:
            codes, late_codes = rows & 0x0F0F0F0F, rows & 0xF0F0F0F0
        else:
            first, more = planes[pair * EACH + 4], planes[pair * EACH + 5]
            rest = _rest(
                first, more, planes[pair * EACH + EACH - 2], planes[pair * EACH + EACH - 1], shift, BITS
            )
            codes, late_codes = _codes(rows, rest, BITS)
        upper = high[pair][:, :, None, None]
        lower = low[pair][:, :, None, None]
        highs = dot_signed(codes, upper, highs)
        lows = dot_unsigned(codes, lower, lows)
        late_highs = dot_signed(late_codes, upper, late_highs)
        late_lows = dot_unsigned(late_codes, lower, late_lows)
    late = (late_highs << 8) + late_lows
    return (highs << 8) + lows, (late >> 4 if BITS == 4 else late)


@triton.jit
def _nibbles(base, d4, next_base, next_d4):
    """Codes' upper four bits, four columns to a word, uint32 [side, 8, 2, 2].

    Lower nibbles belong to four rows, upper nibbles to the rows 16 later.
    """
    evens = ((base << 2) & 0xCCCCCCCC) | (d4 & 0x33333333)
    odds = (base & 0xCCCCCCCC) | ((d4 >> 2) & 0x33333333)
    next_evens = ((next_base << 2) & 0xCCCCCCCC) | (next_d4 & 0x33333333)
    next_odds = (next_base & 0xCCCCCCCC) | ((next_d4 >> 2) & 0x33333333)
    front, back = bytes_of(evens, odds, "0x5140"), bytes_of(evens, odds, "0x7362")
    next_front, next_back = (
        bytes_of(next_evens, next_odds, "0x5140"),
        bytes_of(next_evens, next_odds, "0x7362"),
    )
    return _four_rows(front, next_front, back, next_back)


@triton.jit
def _rest(word, more, next_word, next_more, shift, BITS: tl.constexpr):
    """Bits after the fourth, uint32 [side, 8, 2, 2] as in `_nibbles`: the lowest of a byte are of four rows."""
    word, more = word >> shift, more >> shift
    if BITS == 5:
        return _four_rows(word, word >> 4, more, more >> 4)
    return _four_rows(word, next_word >> shift, more, next_more >> shift)


@triton.jit
def _four_rows(a, next_a, b, next_b):
    """uint32 [side, 8, 2, 2]: the halves of a and of b, each with the half that belongs to the next four columns."""
    row_0, row_1 = bytes_of(a, next_a, "0x5410"), bytes_of(a, next_a, "0x7632")
    row_2, row_3 = bytes_of(b, next_b, "0x5410"), bytes_of(b, next_b, "0x7632")
    return tl.join(tl.join(row_0, row_2), tl.join(row_1, row_3)).to(tl.uint32, bitcast=True)


@triton.jit
def _codes(rows, rest, BITS: tl.constexpr):
    """A byte per code: codes of four rows, and of the rows 16 later."""
    WIDTH: tl.constexpr = BITS - 4
    UPPER: tl.constexpr = 0x0F0F0F0F << WIDTH
    LOWER: tl.constexpr = 0x01010101 if BITS == 5 else 0x03030303
    codes = ((rows << WIDTH) & UPPER) | (rest & LOWER)
    return codes, ((rows >> (4 - WIDTH)) & UPPER) | ((rest >> (2 * WIDTH)) & LOWER)


@triton.jit
def _scaled(sums, totals, steps, weight, count, row, group, groups, BITS: tl.constexpr):
    """float32 [SIDE, 8, 2, 2]: products of rows with groups of x, from integer sums of codes times x, and of x."""
    # A weight is scale * (FACTOR * code - ZERO) * UNIT + centre (storage.record.planes), with integers in brackets.
    FACTOR: tl.constexpr = 1 if BITS == 4 else 2
    ZERO: tl.constexpr = 8 if BITS == 4 else (33 if BITS == 5 else 67)
    UNIT: tl.constexpr = 1.0 if BITS == 4 else (0.25 if BITS == 5 else 0.125)
    pairs = weight.to(tl.pointer_type(tl.uint32)) + (group * count)[:, None] + row[None, :]
    inside = (group < groups)[:, None] & (row >= 0)[None, :]
    # A pair at a time, as the sums lie: wider loads would move the sums to other threads.
    pair_0, pair_1 = tl.load(pairs, mask=inside, other=0), tl.load(pairs + 1, mask=inside, other=0)
    pair_2, pair_3 = tl.load(pairs + 2, mask=inside, other=0), tl.load(pairs + 3, mask=inside, other=0)
    pair = tl.join(tl.join(pair_0, pair_2), tl.join(pair_1, pair_3))
    scale = (pair << 16).to(tl.float32, bitcast=True)
    centre = (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
    unit = (steps * UNIT)[:, :, None, None]
    whole = (totals.to(tl.float32) * steps)[:, :, None, None]
    return (sums * FACTOR - totals[:, :, None, None] * ZERO).to(tl.float32) * unit * scale + whole * centre
