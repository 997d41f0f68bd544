"""Routed experts by edgemoe's own CPU kernel: products with planes as they lie (csrc/experts/)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from edgemoe.kernels.activation import gating_of
from edgemoe.kernels.base import Activation, Part
from edgemoe.kernels.native import library as native
from storage.base import Blocks, Plane
from storage.layout import Layout
from storage.record import MatrixSpec, RecordGeometry

_FEWEST_COLUMNS = 32
"""That share a scale: a group's, and at most 64."""

_BASE, _D4, _D8 = (plane.label for plane in Plane)

MOST_ROWS = 512
"""Rows of a call that scratch_bytes counts on; more take more memory while they are computed."""


class _Matrix(ctypes.Structure):
    """`matrix` in csrc/experts/planes.h."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("rows", "cols", "group", "parameters_at", "codes_at", "half")
    )


class _Expert(ctypes.Structure):
    """`expert` in csrc/experts/planes.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parameters", "base", "d4", "d8")),
        *((name, ctypes.c_int64) for name in ("level", "x", "y", "tokens")),
    )


class NativeExpertKernel:
    """Runs experts of one geometry.

    Args:
        geometry: of the store.
        layout: that resident planes are in; native.LAYOUT.

    Raises:
        ValueError: another layout.
    """

    def __init__(self, geometry: RecordGeometry, layout: Layout) -> None:
        if layout != native.LAYOUT:
            raise ValueError(f"the kernel reads {native.LAYOUT.name}, not {layout.name}")
        self._geometry = geometry
        self._matrices = [
            (
                spec,
                _Matrix(
                    spec.padded_rows, spec.padded_cols, spec.group, at, codes // 2, geometry.codes_bytes // 2
                ),
            )
            for spec, at, codes in geometry.matrix_offsets()
        ]

    @staticmethod
    def scratch_bytes(geometry: RecordGeometry) -> int:
        """Bytes of a call's activations: both products' in both forms, with scales and sums, and what lies between."""
        up, down = geometry.matrices
        columns = up.padded_cols + down.padded_cols
        numbers = 3 * columns + 16 * columns // _FEWEST_COLUMNS + 2
        return MOST_ROWS * (numbers + 2 * (up.padded_rows + down.padded_cols))

    def forward(self, x: torch.Tensor, parts: Sequence[Part], gate: Activation) -> torch.Tensor:
        """See ExpertKernel."""
        experts = (_Expert * len(parts))(
            *(self._expert(part.blocks, part.level, part.rows) for part in parts)
        )
        up, down = self._matrices
        if gating_of(gate) == "silu":
            x = _laid_out(x, up[0], parts, experts)
            y = x.new_empty(sum(part.rows for part in parts), down[0].padded_rows)
            self._experts(x, experts, y)
            return y if y.shape[1] == down[0].rows else y[:, : down[0].rows]
        return self._product(gate(self._product(x, parts, experts, *up)), parts, experts, *down)

    def takes(self, gate: Activation) -> bool:
        """See TokenKernel. Not where sizes are padded, nor a gating that it does not know."""
        (up, _), (down, _) = self._matrices
        return up.padded_cols == up.cols and down.padded_rows == down.rows and gating_of(gate) == "silu"

    def prepared(self, blocks: Blocks, level: int) -> _Expert:
        """See TokenKernel."""
        return self._expert(blocks, level, 1)

    def into(self, x: torch.Tensor, experts: Sequence[Any], rows: Sequence[int], y: torch.Tensor) -> None:
        """See TokenKernel."""
        together = (_Expert * len(experts))(*experts)
        for expert, row in zip(together, rows, strict=True):
            expert.y = row
        self._experts(x, together, y)

    def _experts(self, x: torch.Tensor, experts: Any, y: torch.Tensor) -> None:
        (_, up), (down, down_matrix) = self._matrices
        if native.library().edgemoe_experts(
            *(
                native.threads(),
                ctypes.byref(up),
                ctypes.byref(down_matrix),
                down.cols,
                experts,
                len(experts),
            ),
            *(x.data_ptr(), x.shape[0], y.data_ptr(), y.shape[0]),
        ):
            raise MemoryError("no memory for experts' activations")

    def _expert(self, blocks: Blocks, level: int, rows: int) -> _Expert:
        base = native.address(blocks[_BASE])
        d4 = native.address(blocks[_D4]) if level > 2 else None
        d8 = native.address(blocks[_D8]) if level > 4 else None
        return _Expert(base, base + self._geometry.parameter_bytes, d4, d8, level, 0, 0, rows)

    def _product(
        self, x: torch.Tensor, parts: Sequence[Part], experts: Any, spec: MatrixSpec, matrix: _Matrix
    ) -> torch.Tensor:
        """bf16 [R, K] -> bf16 [R, N] through one quantized matrix of every part's expert."""
        x = _laid_out(x, spec, parts, experts)
        y = x.new_empty(sum(part.rows for part in parts), matrix.rows)
        if native.library().edgemoe_expert_product(
            native.threads(),
            ctypes.byref(matrix),
            experts,
            len(experts),
            x.data_ptr(),
            x.shape[0],
            y.data_ptr(),
        ):
            raise MemoryError("no memory for a product's activations")
        return y if spec.padded_rows == spec.rows else y[:, : spec.rows]

    def sizes(self) -> tuple[int, int, int]:
        """For a structure of C: where its two matrices' are, valid as long as this, and numbers between the two."""
        (_, up), (down, down_matrix) = self._matrices
        return ctypes.addressof(up), ctypes.addressof(down_matrix), down.cols


class HeldExperts:
    """What C finds of a layer's experts that are held for good. None is at first.

    Args:
        kernel: which prepared them.
        experts: in the layer.
    """

    def __init__(self, kernel: NativeExpertKernel, experts: int) -> None:
        self.kernel, self._table = kernel, room_for(experts)

    @property
    def address(self) -> int:
        """Of the table, `expert` in csrc/experts/planes.h each; of level 0 what is not held. Valid as long as this."""
        return ctypes.addressof(self._table)

    def put(self, expert: int, prepared: Any) -> None:
        """This one is held from now on."""
        self._table[expert] = prepared

    def clear(self) -> None:
        """None is any more."""
        ctypes.memset(self._table, 0, ctypes.sizeof(self._table))


def room_for(experts: int) -> ctypes.Array[_Expert]:
    """So many structures of an expert, all 0."""
    return (_Expert * experts)()


def _laid_out(x: torch.Tensor, spec: MatrixSpec, parts: Sequence[Part], experts: Any) -> torch.Tensor:
    """Rows as a product reads them, one expanded row once; tells each expert where its own are, of x and of y."""
    shared = x.stride(0) == 0 and len(parts) == x.shape[0]
    row = 0
    for part, expert in zip(parts, experts, strict=True):
        expert.x, expert.y = 0 if shared else row, row
        row += part.rows
    x = x[:1] if shared else x
    if spec.padded_cols != spec.cols:
        x = torch.nn.functional.pad(x, (0, spec.padded_cols - spec.cols))
    return x.contiguous()
