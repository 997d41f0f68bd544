"""Dense matrices of 4 to 6 bits (storage.store.dense_groups) as bf16, for products of many rows by tensor cores.

A program reads the bytes of 32 rows and a few groups once, and puts their codes in the order of rows and columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.products import OPTIONS
from edgemoe.storage.store.dense_groups import columns_of
from edgemoe.storage.store.dense_shapes import GROUP, ROWS, bits_of

SIDE = 4
"""Groups that a program writes."""


def decoded_rows(weight: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Launches the decoding of rows [start, end), multiples of 32, of a matrix on a device: bf16 [end - start, K]."""
    cols = columns_of(weight)
    out = torch.empty(end - start, cols, dtype=torch.bfloat16, device=weight.device)
    grid = ((end - start) // ROWS, triton.cdiv(cols // GROUP, SIDE))
    bits = bits_of(tuple(weight.shape))
    decode_groups[grid](weight, out, len(weight), cols // GROUP, start // ROWS, bits, SIDE, **OPTIONS)
    return out


@triton.jit
def decode_groups(weight, out, count, groups, first, BITS: tl.constexpr, SIDE: tl.constexpr):
    """Writes the weights bf16 of 32 rows and SIDE groups to out [rows, 64 groups], whose first block is `first`."""
    block, group = first + tl.program_id(0), tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    base = weight + (4 * count * groups).to(tl.int64)
    d4 = base + (16 * count * groups).to(tl.int64)
    rest = d4 + (16 * count * groups).to(tl.int64)
    codes = _upper_bits(base, d4, block, group, groups, SIDE)
    if BITS == 6:
        codes = (codes << 2) | _two_bits(rest, block, group, groups, SIDE)
    elif BITS == 5:
        codes = (codes << 1) | _one_bit(rest, block, group, groups, SIDE)
    UNIT: tl.constexpr = 1.0 if BITS == 4 else (0.5 if BITS == 5 else 0.25)
    ZERO: tl.constexpr = 8.0 if BITS == 4 else (8.25 if BITS == 5 else 8.375)
    row = block * 32 + tl.arange(0, 32)
    pairs = weight.to(tl.pointer_type(tl.uint32)) + row[:, None] + (group * count)[None, :]
    pair = tl.load(pairs, mask=(row >= 0)[:, None] & (group < groups)[None, :], other=0)
    scale = (pair << 16).to(tl.float32, bitcast=True)[:, :, None]
    centre = (pair & 0xFFFF0000).to(tl.float32, bitcast=True)[:, :, None]
    numbers = tl.reshape(codes.to(tl.float32) * UNIT - ZERO, (32, SIDE, 64)) * scale + centre
    line = tl.program_id(0) * 32 + tl.arange(0, 32)
    at = (
        (line * groups).to(tl.int64)[:, None, None] * 64
        + (group * 64)[None, :, None]
        + tl.arange(0, 64)[None, None, :]
    )
    tl.store(out + at, numbers.to(tl.bfloat16), mask=(group < groups)[None, :, None] & (at >= 0))


@triton.jit
def _plane_bytes(plane, block, group, groups, SIDE: tl.constexpr, BYTES: tl.constexpr):
    """uint8 [SIDE * BYTES]: bytes of a plane, BYTES per block of rows and group."""
    at = (block * groups + group).to(tl.int64)[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    return tl.reshape(
        tl.load(plane + at, mask=(group < groups)[:, None] & (at >= 0), other=0), (SIDE * BYTES,)
    )


@triton.jit
def _upper_bits(base, d4, block, group, groups, SIDE: tl.constexpr):
    """Codes' upper four bits, uint8 [32, SIDE * 64]."""
    two = _plane_bytes(base, block, group, groups, SIDE, 512)
    next_two = _plane_bytes(d4, block, group, groups, SIDE, 512)
    field_0 = ((two & 3) << 2) | (next_two & 3)
    field_1 = (two & 12) | ((next_two >> 2) & 3)
    field_2 = ((two >> 2) & 12) | ((next_two >> 4) & 3)
    field_3 = ((two >> 4) & 12) | (next_two >> 6)
    # [quads, columns of a pair, rows, pairs, halves of rows]
    fields = tl.join(tl.join(field_0, field_1), tl.join(field_2, field_3))
    fields = tl.permute(tl.reshape(fields, (SIDE * 16, 2, 16, 2, 2)), (4, 2, 0, 3, 1))
    return tl.reshape(fields, (32, SIDE * 64))


@triton.jit
def _two_bits(plane, block, group, groups, SIDE: tl.constexpr):
    """The two bits after codes' upper four, uint8 [32, SIDE * 64]."""
    codes = _plane_bytes(plane, block, group, groups, SIDE, 512)
    # [quads, columns of a pair, rows, pairs, eights of rows, halves of rows]
    fields = tl.join(tl.join(codes & 3, (codes >> 2) & 3), tl.join((codes >> 4) & 3, codes >> 6))
    fields = tl.permute(tl.reshape(fields, (SIDE * 16, 2, 8, 2, 2, 2)), (5, 4, 2, 0, 3, 1))
    return tl.reshape(fields, (32, SIDE * 64))


@triton.jit
def _one_bit(plane, block, group, groups, SIDE: tl.constexpr):
    """The bit after codes' upper four, uint8 [32, SIDE * 64]."""
    codes = _plane_bytes(plane, block, group, groups, SIDE, 256)
    early = tl.join(tl.join(codes & 1, (codes >> 1) & 1), tl.join((codes >> 2) & 1, (codes >> 3) & 1))
    late = tl.join(tl.join((codes >> 4) & 1, (codes >> 5) & 1), tl.join((codes >> 6) & 1, codes >> 7))
    # [pairs of quads, columns of a pair, rows, pairs, eights of rows, halves of rows, quads]
    fields = tl.reshape(tl.join(early, late), (SIDE * 8, 2, 8, 2, 2, 2, 2))
    return tl.reshape(tl.permute(fields, (5, 4, 2, 0, 6, 3, 1)), (32, SIDE * 64))
