"""Computing a single token's experts on the CPU from planes in the layout of a GPU, by csrc/experts/gemv_cuda_layout.c.

What the DRAM tier beside a device holds is laid out for the device. One token's products read it as it lies at about
the speed of memory; more tokens are not computed here (cpu_experts).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from edgemoe.kernels.base import Activation, Part
from edgemoe.kernels.native import library as native
from storage.base import Plane
from storage.layout import LAYOUTS, Layout, slab_columns
from storage.record import MatrixSpec, RecordGeometry

LAYOUT = LAYOUTS["cuda"]
"""What the kernel reads."""


@cache
def available() -> bool:
    """Whether this process can use the kernel."""
    if not native.available():
        return False
    pointer = ctypes.c_void_p
    native.library().edgemoe_slab_product.argtypes = [pointer] * 4
    return True


class _Matrix(ctypes.Structure):
    """`slab_matrix` in csrc/experts/gemv_cuda_layout.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "cols", "group")),
        *((name, ctypes.c_void_p) for name in ("parameters", "base", "d4", "even", "odd")),
        ("level", ctypes.c_int64),
    )


class SlabExpertKernel:
    """Runs experts of one geometry, a row at a time.

    Args:
        geometry: of the store.
        layout: that resident planes are in; LAYOUT.

    Raises:
        ValueError: another layout.
    """

    def __init__(self, geometry: RecordGeometry, layout: Layout) -> None:
        if layout != LAYOUT:
            raise ValueError(f"the kernel reads {LAYOUT.name}, not {layout.name}")
        self._geometry = geometry

    @staticmethod
    def scratch_bytes(geometry: RecordGeometry) -> int:
        """Bytes of a row's numbers in 16 bits, and three floats a slab."""
        return max(
            2 * spec.padded_cols + 12 * (spec.padded_cols // slab_columns(spec.padded_cols))
            for spec in geometry.matrices
        )

    def forward(self, x: torch.Tensor, parts: Sequence[Part], gate: Activation) -> torch.Tensor:
        """See ExpertKernel."""
        return self._products(gate(self._products(x, parts, 0)), parts, 1)

    def _products(self, x: torch.Tensor, parts: Sequence[Part], matrix: int) -> torch.Tensor:
        """bf16 [R, K] -> bf16 [R, N] through every part's gate_up (0) or down (1) matrix."""
        spec, parameters_at, codes_at = self._geometry.matrix_offsets()[matrix]
        x = torch.nn.functional.pad(x, (0, spec.padded_cols - spec.cols)).contiguous()
        y = x.new_empty(x.shape[0], spec.padded_rows)
        row = 0
        for part in parts:
            one = self._matrix(part, spec, parameters_at, codes_at)
            for _ in range(part.rows):
                if native.library().edgemoe_slab_product(
                    native.threads(), ctypes.byref(one), x[row].data_ptr(), y[row].data_ptr()
                ):
                    raise MemoryError("no memory for a product's activations")
                row += 1
        return y[:, : spec.rows]

    def _matrix(self, part: Part, spec: MatrixSpec, parameters_at: int, codes_at: int) -> _Matrix:
        half, at = self._geometry.codes_bytes // 2, codes_at // 2
        base = native.address(part.blocks[Plane.BASE.label])
        codes = base + self._geometry.parameter_bytes + at
        d4 = native.address(part.blocks[Plane.D4.label]) + at if part.level > 2 else None
        d8: Any = native.address(part.blocks[Plane.D8.label]) + at if part.level > 4 else None
        odd = None if d8 is None else d8 + half
        sizes = spec.padded_rows, spec.padded_cols, spec.group
        return _Matrix(*sizes, base + parameters_at, codes, d4, d8, odd, part.level)
