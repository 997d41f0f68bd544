"""The product of one row at one level alone, as a kernel whose instructions can be counted."""

from __future__ import annotations

import triton
import triton.language as tl

from edgemoe.kernels.triton.matvec import _address, multiply_rows


@triton.jit
def at_level(items, x, y, P: tl.constexpr, T: tl.constexpr, LEVEL: tl.constexpr):
    """Computes the product of one item at LEVEL; arguments as in `matvec`."""
    pairs, base = _address(items, 0), _address(items, 1)
    d4, even, odd = _address(items, 2), _address(items, 3), _address(items, 4)
    multiply_rows((pairs, base, d4, even, odd), x, y, P, T, LEVEL)
