"""A single token's experts on the CPU, from planes in a GPU's layout, by csrc/experts/gemv_cuda_layout.c.

The DRAM tier beside a device has planes in the device's layout. The kernel reads them at about the speed of memory for
one row; the engine does not use it for steps of more tokens (engine.cpu_offload).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from edgemoe.kernels.activation import Activation
from edgemoe.kernels.base import Part
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.structures import SlabMatrix
from storage.base import Plane
from storage.layout import LAYOUTS, Layout, slab_columns
from storage.record import MatrixSpec, RecordGeometry

LAYOUT = LAYOUTS["cuda"]
"""The layout that the kernel reads."""


class SlabExpertKernel:
    """Implements ExpertKernel for planes in LAYOUT, one row at a time.

    Args:
        geometry: of the store.
        layout: of resident planes; LAYOUT.

    Raises:
        ValueError: another layout.
    """

    def __init__(self, geometry: RecordGeometry, layout: Layout) -> None:
        if layout != LAYOUT:
            raise ValueError(f"expected planes in {LAYOUT.name}, got {layout.name}")
        self._geometry = geometry

    @staticmethod
    def scratch_bytes(geometry: RecordGeometry) -> int:
        """Returns the bytes of a row: its numbers in 16 bits, and three floats for each slab."""
        return max(
            2 * spec.padded_cols + 12 * (spec.padded_cols // slab_columns(spec.padded_cols))
            for spec in geometry.matrices
        )

    def forward(
        self, x: torch.Tensor, parts: Sequence[Part], activation: Activation, out: torch.Tensor
    ) -> None:
        """Implements ExpertKernel.forward."""
        out.copy_(self._products(activation.apply(self._products(x, parts, 0)), parts, 1))

    def _products(self, x: torch.Tensor, parts: Sequence[Part], matrix: int) -> torch.Tensor:
        """Multiplies bf16 [R, K] with each part's gate_up (0) or down (1) matrix to bf16 [R, N]."""
        spec, parameters_at, codes_at = self._geometry.matrix_offsets()[matrix]
        x = torch.nn.functional.pad(x, (0, spec.padded_cols - spec.cols)).contiguous()
        y = x.new_empty(x.shape[0], spec.padded_rows)
        row = 0
        for part in parts:
            slabs = self._matrix(part, spec, parameters_at, codes_at)
            for _ in range(part.rows):
                result = native.library().edgemoe_slab_product(
                    *(native.threads(), ctypes.byref(slabs), x[row].data_ptr(), x.shape[1]),
                    *(y[row].data_ptr(), y.shape[1]),
                )
                if result:
                    raise native.failure(result, "a product's activations")
                row += 1
        return y[:, : spec.rows]

    def _matrix(self, part: Part, spec: MatrixSpec, parameters_at: int, codes_at: int) -> SlabMatrix:
        half, at = self._geometry.codes_bytes // 2, codes_at // 2
        base = native.address(part.blocks[Plane.BASE.label])
        even = native.address(part.blocks[Plane.D8.label]) + at if part.level > 4 else None
        return SlabMatrix(
            rows=spec.padded_rows,
            cols=spec.padded_cols,
            group=spec.group,
            parameters=base + parameters_at,
            base=base + self._geometry.parameter_bytes + at,
            d4=native.address(part.blocks[Plane.D4.label]) + at if part.level > 2 else None,
            even=even,
            odd=None if even is None else even + half,
            level=part.level,
        )
