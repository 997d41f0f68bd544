"""Numbers of x as 16-bit integers times a power of two per slab, and products of bytes with them.

The largest number of a slab has 15 bits before its sign, so numbers down to its 128th part are exact in bf16's eight
bits, and others change by at most its 65,536th part. An instruction (dp4a) multiplies four bytes with four others and
adds up the products.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fixed_point(numbers, SIDE: tl.constexpr, SLAB: tl.constexpr):
    """Numbers as integers times a step.

    Args:
        numbers: float32 [SIDE, SLAB], of bf16.
        SIDE: slabs, a power of two.
        SLAB: columns of a slab: 32 or 64.

    Returns:
        Upper bytes (signed) and lower bytes (unsigned), four to a word, int32 [SIDE, SLAB / 4] each; steps, float32
        [SIDE], NaN where a number of the slab is not finite.
    """
    # As integers, magnitudes of floats are ordered like the floats, and NaN is the largest.
    magnitudes = tl.reshape(numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF, (SIDE, SLAB // 8, 8))
    largest = tl.max(tl.max(magnitudes, 2), 1)
    exponent = tl.maximum(largest >> 23, 15)
    inverse = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
    steps = tl.where(exponent == 255, float("nan"), ((exponent - 14) << 23).to(tl.float32, bitcast=True))
    # Adding 1.5 times 2 ** 23 rounds to an integer, in the lowest bits.
    rounded = (numbers * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True)
    ends, middles = tl.split(tl.reshape(rounded, (SIDE, SLAB // 4, 2, 2)))
    first, third = tl.split(ends)
    second, fourth = tl.split(middles)
    front, back = bytes_of(first, second, "0x5410"), bytes_of(third, fourth, "0x5410")
    return bytes_of(front, back, "0x7531"), bytes_of(front, back, "0x6420"), steps


@triton.jit
def dot_signed(a, b, sums):
    """int32: sums + the products of four unsigned bytes of a with four signed bytes of b."""
    return tl.inline_asm_elementwise(
        "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, sums], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def dot_unsigned(a, b, sums):
    """int32: sums + the products of four unsigned bytes of a with four unsigned bytes of b."""
    return tl.inline_asm_elementwise(
        "dp4a.u32.u32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, sums], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def bytes_of(a, b, ORDER: tl.constexpr):
    """int32: four of the eight bytes of a (0 to 3) and b (4 to 7); ORDER has a digit for each, from the highest."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, " + ORDER + ";", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def dot_weights(weights, high, low):
    """int32: the products of four signed bytes of weights with the integers whose bytes are high and low."""
    nothing = tl.zeros(weights.shape, tl.int32)
    upper = tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [weights, high, nothing],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    lower = tl.inline_asm_elementwise(
        "dp4a.s32.u32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [weights, low, nothing],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    return (upper << 8) + lower
