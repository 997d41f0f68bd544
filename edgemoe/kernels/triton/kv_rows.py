"""Rows of keys and values as a kernel stores and loads them, with the bits of edgemoe.kv.rows.

Functions for other kernels, which take a RowForm as a constant.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from edgemoe.kv.formats import KINDS, row_bytes
from edgemoe.kv.rows import row_of

SMALLEST = 16
"""Fewest rows and columns of a tile that tl.dot multiplies."""


@dataclass(frozen=True)
class RowForm:
    """How rows of one kind, keys or values, are stored.

    Args:
        size: Numbers per row.
        kind: Name of the format, one of KINDS.
        turned: Numbers that are stored after a Hadamard rotation of so many together (KVFormat.rotation); 0: none.
    """

    size: int
    kind: str = "bf16"
    turned: int = 0

    @property
    def padded(self) -> int:
        """The size up to a power of two, at least a block of codes."""
        padded: int = triton.next_power_of_2(self.size)
        return max(padded, 32)

    @property
    def code(self) -> int:
        """Number of the format."""
        return KINDS.index(self.kind)

    @property
    def width(self) -> int:
        """Elements per stored row."""
        return row_of(self.kind, self.size)[1]

    @property
    def aligned(self) -> int:
        """Bytes that the address of every row divides by, at most 16."""
        row = row_bytes(self.kind, self.size)
        return min(row & -row, 16)

    @property
    def steps(self) -> int:
        """Steps of the Hadamard rotation, the logarithm of `turned`."""
        return max(self.turned.bit_length() - 1, 0)

    @property
    def tiles(self) -> tuple[int, int]:
        """Columns of the two tiles that hold a row, powers of two; the second is 0 where one tile is as small.

        >>> RowForm(128).tiles, RowForm(576).tiles, RowForm(80).tiles, RowForm(112).tiles
        ((128, 0), (512, 64), (64, 16), (128, 0))
        """
        whole = max(triton.next_power_of_2(self.size), SMALLEST)
        head = whole // 2
        if whole == self.size or head < SMALLEST:
            return whole, 0
        tail = max(triton.next_power_of_2(self.size - head), SMALLEST)
        return (head, tail) if head + tail < whole else (whole, 0)


@triton.jit
def load_tile(rows, row, mask, FIRST: tl.constexpr, COUNT: tl.constexpr, F: tl.constexpr):
    """Loads COUNT numbers of some rows, from number FIRST on: bf16, or float32 of codes, [COUNT, rows]; 0 outside.

    Args:
        rows: int64, the address of row 0.
        row: int64 [rows].
        mask: Rows that are loaded; numbers after the last one are masked here.
        FIRST, COUNT: Multiples of 16; of 32 where a block of codes would be cut.
        F: The RowForm.
    """
    row, mask, lane = row[None, :], mask[None, :], FIRST + tl.arange(0, COUNT)[:, None]
    inside = mask & (lane < F.size)
    ALIGNED: tl.constexpr = F.aligned
    SCALES: tl.constexpr = 2 * ((F.size + 31) // 32)
    halves = tl.multiple_of(rows.to(tl.pointer_type(tl.bfloat16)), ALIGNED)
    if F.code == 0:
        numbers = tl.load(halves + (row * F.width + lane), mask=inside, other=0)
    elif F.code == 1:
        codes = tl.multiple_of(rows.to(tl.pointer_type(tl.int8)), ALIGNED)
        code = tl.load(codes + (row * F.width + SCALES + lane), mask=inside, other=0)
        numbers = code.to(tl.float32) * _scales(halves + row * (F.width // 2), mask, FIRST, COUNT, F)
    else:
        codes = tl.multiple_of(rows.to(tl.pointer_type(tl.uint8)), ALIGNED)
        pair = tl.load(codes + (row * F.width + SCALES + lane // 16 * 8 + lane % 8), mask=inside, other=0)
        code = (pair >> (lane % 16 // 8 * 4)) & 15
        scales = _scales(halves + row * (F.width // 2), mask, FIRST, COUNT, F)
        numbers = (code.to(tl.float32) - 8) * scales
    return numbers


@triton.jit
def load_rows(rows, row, mask, FIRST: tl.constexpr, COUNT: tl.constexpr, F: tl.constexpr):
    """Loads the numbers of `load_tile` as [rows, COUNT]; bf16 as it lies, so that the loads are made ahead."""
    if F.code == 0:
        lane = FIRST + tl.arange(0, COUNT)[None, :]
        ALIGNED: tl.constexpr = F.aligned
        plain = tl.multiple_of(rows.to(tl.pointer_type(tl.bfloat16)), ALIGNED)
        at, inside = row[:, None] * F.width + lane, mask[:, None] & (lane < F.size)
        numbers = tl.load(plain + at, mask=inside, other=0)
    else:
        numbers = tl.trans(load_tile(rows, row, mask, FIRST, COUNT, F))
    return numbers


@triton.jit
def _scales(row, mask, FIRST: tl.constexpr, COUNT: tl.constexpr, F: tl.constexpr):
    """float32 [COUNT, rows]: each number's scale, of which a block of 32 has one, so that it is loaded once."""
    RUN: tl.constexpr = min(COUNT, 32)
    BLOCKS: tl.constexpr = COUNT // RUN
    ROWS: tl.constexpr = mask.shape[1]
    block = FIRST // 32 + tl.arange(0, BLOCKS)[:, None]
    scale = tl.load(row + block, mask=mask & (block * 32 < F.size), other=0).to(tl.float32)
    return tl.reshape(tl.broadcast_to(scale[:, None, :], (BLOCKS, RUN, ROWS)), (COUNT, ROWS))


@triton.jit
def store_row(rows, at, x, F: tl.constexpr):
    """Stores x [F.padded], bf16 with 0 after its F.size numbers, as row `at`, turned and encoded as F says."""
    if F.steps > 0:
        _store_numbers(rows, at, turn(x, F.padded, F.steps), F)
    else:
        _store_numbers(rows, at, x, F)


@triton.jit
def _store_numbers(rows, at, x, F: tl.constexpr):
    ALIGNED: tl.constexpr = F.aligned
    PADDED: tl.constexpr = F.padded
    lane = tl.arange(0, PADDED)
    if F.code == 0:
        plain = tl.multiple_of(rows.to(tl.pointer_type(tl.bfloat16)), ALIGNED)
        tl.store(plain + (at * F.width + lane), x.to(tl.bfloat16), mask=lane < F.size)
    else:
        BLOCKS: tl.constexpr = (F.size + 31) // 32
        RUNS: tl.constexpr = PADDED // 32
        PAIRS: tl.constexpr = PADDED // 16
        scales, codes = _codes(tl.reshape(x.to(tl.float32), (RUNS, 32)), F.code)
        block = tl.arange(0, RUNS)
        halves = rows.to(tl.pointer_type(tl.int16)) + at * (F.width // 2)
        tl.store(halves + block, scales, mask=block < BLOCKS)
        row = rows.to(tl.pointer_type(tl.int8)) + (at * F.width + 2 * BLOCKS)
        if F.code == 1:
            tl.store(row + lane, tl.reshape(codes, (PADDED,)), mask=lane < (F.size + 15) // 16 * 16)
        else:
            low, high = tl.split(tl.permute(tl.reshape(codes + 8, (PAIRS, 2, 8)), (0, 2, 1)))
            group, own = tl.arange(0, PAIRS)[:, None], tl.arange(0, 8)[None, :]
            tl.store(row + group * 8 + own, low | (high << 4), mask=group < (F.size + 15) // 16)


@triton.jit
def _codes(x, KIND: tl.constexpr):
    """Scales, the bits of bf16 as int16 [blocks], and codes, int8 [blocks, 32], of float32 x [blocks, 32]."""
    high, low = tl.max(x, 1), tl.min(x, 1)
    # A maximum does not show a NaN, so every number is tested.
    bits = x.to(tl.int32, bitcast=True)
    finite = tl.max(((bits & 0x7F800000) == 0x7F800000).to(tl.int32), 1) == 0
    largest = tl.maximum(high, -low) if KIND == 1 else tl.where(-low > high, low, high)
    exact = tl.div_rn(largest, 127.0 if KIND == 1 else -8.0)
    up = (exact.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    up = tl.where((up & 0x7FFFFFFF) == 0, 0, up)
    by = tl.where(up == 0, 1.0, up.to(tl.float32, bitcast=True))
    # Adding and subtracting 1.5 * 2^23 rounds to even.
    exact = tl.div_rn(x, tl.broadcast_to(by[:, None], x.shape))
    codes = (exact + 12582912.0) - 12582912.0
    LOWEST: tl.constexpr = -127.0 if KIND == 1 else -8.0
    HIGHEST: tl.constexpr = 127.0 if KIND == 1 else 7.0
    codes = tl.where(finite[:, None], tl.minimum(tl.maximum(codes, LOWEST), HIGHEST), 0.0)
    return (tl.where(finite, up, 0x7FC00000) >> 16).to(tl.int16), codes.to(tl.int8)


@triton.jit
def turn(x, N: tl.constexpr, STEPS: tl.constexpr):
    """float32 [N]: each run of 2^STEPS numbers of x times the Hadamard matrix, over the root of its size."""
    x = x.to(tl.float32)
    for i in tl.static_range(STEPS):
        pairs = tl.permute(tl.reshape(x, (N // (2 << i), 2, 1 << i)), (0, 2, 1))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (N,))
    ROOT: tl.constexpr = 2.0 ** (-STEPS / 2)
    return x * ROOT
