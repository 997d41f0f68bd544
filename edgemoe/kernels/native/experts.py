"""Routed experts by the compiled CPU kernel: products with planes as they lie (csrc/experts/)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from edgemoe.kernels.activation import Activation
from edgemoe.kernels.base import MOST_ROWS, QUANTIZED_COLUMNS, Part, Rows, quantized_row_bytes
from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.structures import Expert, Matrix
from edgemoe.storage.base import Blocks, ExpertKey, Plane
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry

_BASE, _D4, _D8 = (plane.label for plane in Plane)


class NativeExpertKernel:
    """Implements ExpertKernel for planes in native.LAYOUT.

    Args:
        geometry: the geometry of the store.
        layout: the layout of resident planes; native.LAYOUT.

    Raises:
        ValueError: another layout.
    """

    def __init__(self, geometry: RecordGeometry, layout: Layout) -> None:
        if layout != native.LAYOUT:
            raise ValueError(f"expected planes in {native.LAYOUT.name}, got {layout.name}")
        self._geometry = geometry
        self._matrices = [
            (
                spec,
                Matrix(
                    rows=spec.padded_rows,
                    cols=spec.padded_cols,
                    group=spec.group,
                    parameters_at=at,
                    codes_at=codes // 2,
                    half=geometry.codes_bytes // 2,
                    parameter_bytes=geometry.parameter_bytes,
                    limit=spec.limit,
                    low_at=low // 2,
                    low_half=geometry.low_bytes // 2,
                ),
            )
            for (spec, at, codes), low in zip(geometry.matrix_offsets(), geometry.low_offsets(), strict=True)
        ]
        (up, _), (down, _) = self._matrices
        self.unpadded = up.padded_cols == up.cols and down.padded_rows == down.rows
        """Whether rows of x and of the result have the sizes that the matrices have in the store."""

    @staticmethod
    def scratch_bytes(geometry: RecordGeometry) -> int:
        """Bytes of a call's activations: both products' in both forms, with scales and sums, and the inner rows."""
        up, down = geometry.matrices
        columns = up.padded_cols + down.padded_cols
        numbers = 3 * columns + 16 * columns // QUANTIZED_COLUMNS + 2
        return MOST_ROWS * (numbers + 2 * (up.padded_rows + down.padded_cols))

    def forward(self, x: Rows, parts: Sequence[Part], activation: Activation, out: torch.Tensor) -> None:
        """Implements ExpertKernel.forward."""
        experts = (Expert * len(parts))()
        for i, part in enumerate(parts):
            one = self.prepared(part.blocks, part.level, part.rows)
            if part.compensator:
                one.compensator, one.compensated = part.compensator.address, part.compensated
            experts[i] = one
        up, down = self._matrices
        if activation.name != "silu":
            inner = activation.apply(self._product(x, parts, experts, *up))
            out.copy_(self._product(Rows(inner), parts, experts, *down))
            return
        arguments, _kept = _laid_out(x, parts, experts, *up)
        y = out if self.unpadded else out.new_empty(len(out), down[0].padded_rows)
        result = native.library().edgemoe_experts(
            *(native.threads(), ctypes.byref(up[1]), ctypes.byref(down[1]), down[0].cols),
            *(experts, len(parts), *arguments, None, y.data_ptr(), *y.shape),
        )
        if result:
            raise native.failure(result, "experts' activations")
        if y is not out:
            out.copy_(y[:, : down[0].rows])

    def prepared(self, blocks: Blocks, level: int, rows: int = 1) -> Expert:
        """The C structure of an expert, valid for as long as its blocks stay where they are.

        Args:
            blocks: its resident blocks; kept alive by their tier, not by the structure.
            level: the level to compute at.
            rows: its consecutive rows of a call.
        """
        buffer, address = ctypes.c_char.from_buffer, ctypes.addressof
        base = address(buffer(blocks[_BASE]))
        return Expert(
            parameters=base,
            base=base + self._geometry.parameter_bytes,
            d4=address(buffer(blocks[_D4])) if level > 2 else None,
            d8=address(buffer(blocks[_D8])) if level > 4 else None,
            level=level,
            tokens=rows,
        )

    def _product(
        self, x: Rows, parts: Sequence[Part], experts: Any, spec: MatrixSpec, matrix: Matrix
    ) -> torch.Tensor:
        """bf16 [R, K] -> bf16 [R, N] through one quantized matrix of every part's expert."""
        arguments, _kept = _laid_out(x, parts, experts, spec, matrix)
        y = x.x.new_empty(sum(part.rows for part in parts), matrix.rows)
        result = native.library().edgemoe_expert_product(
            *(native.threads(), ctypes.byref(matrix), spec.name == "down", experts, len(parts)),
            *(*arguments, y.data_ptr(), *y.shape),
        )
        if result:
            raise native.failure(result, "a product's activations")
        return y if spec.padded_rows == spec.rows else y[:, : spec.rows]

    def matrices(self) -> tuple[int, int, int]:
        """Addresses of both matrices' structures, valid as long as this object, and the inner size I."""
        (_, up), (down, down_matrix) = self._matrices
        return ctypes.addressof(up), ctypes.addressof(down_matrix), down.cols


class ResidentTable:
    """Resident experts as C reads them: an array of `expert` per layer, level 0 where an expert is not resident.

    Called by the tier whenever an expert arrives, changes its level or goes (cache.plane_tier.PlaneTier.observe).

    Args:
        kernel: prepares experts.
        layers, experts: number of layers, and of experts in a layer.
        first: number of the first of these layers; experts of other layers are left out.

    Attributes:
        experts: number of experts in a layer.
    """

    def __init__(self, kernel: NativeExpertKernel, layers: int, experts: int, first: int = 0) -> None:
        self.experts, self._layers = experts, range(first, first + layers)
        self._kernel, self._table = kernel, (Expert * (layers * experts))()

    def address(self, layer: int) -> int:
        """The address of the array of a layer, by its place among these; valid as long as this object."""
        return ctypes.addressof(self._table) + layer * self.experts * ctypes.sizeof(Expert)

    def changed(self, key: ExpertKey, level: int, blocks: Blocks) -> None:
        """Takes an expert's resident level and blocks over; level 0: it is gone."""
        if key.layer in self._layers:
            prepared = self._kernel.prepared(blocks, level) if level else Expert()
            self._table[(key.layer - self._layers.start) * self.experts + key.expert] = prepared


def weighted_sum(
    rows: torch.Tensor,
    weights: torch.Tensor,
    row_of: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums each token's rows, weighted, in float32 and in the order of its weights.

    Args:
        rows: bf16 [R, H], contiguous.
        weights: float32 [T, k], contiguous.
        row_of: int64 [T, k], contiguous: indices into rows, below 0 for what is left out; None: token t has rows
            t k to t k + k - 1.
        add_to: bf16, T H in all, contiguous: the sums, rounded, are added to it in place.

    Returns:
        bf16 [T, H], or `add_to`.
    """
    out = rows.new_empty(weights.shape[0], rows.shape[1]) if add_to is None else add_to
    places = None if row_of is None else row_of.data_ptr()
    native.library().edgemoe_weighted_sum(
        *(rows.data_ptr(), places, weights.data_ptr(), *weights.shape, rows.shape[1]),
        *(add_to is not None, out.data_ptr()),
    )
    return out


def _laid_out(
    x: Rows, parts: Sequence[Part], experts: Any, spec: MatrixSpec, matrix: Matrix
) -> tuple[tuple[int | None, ...], tuple[torch.Tensor | None, ...]]:
    """Lays rows out as a product reads them; sets each expert's first row of them and of y.

    Rows that are padded, which is rare, are gathered and quantized in every call.

    Returns:
        C's arguments: x, its rows and columns, the rows' indices, and x quantized. And the tensors that they point to.
    """
    row = 0
    for part, expert in zip(parts, experts, strict=True):
        expert.x = expert.y = row
        row += part.rows
    shared = x.of is None and len(x.x) == 1 and row == len(parts)
    if shared:
        for expert in experts:
            expert.x = 0
    whole, of, quantized = x.x.contiguous(), x.of, None
    if of is None or spec.padded_cols != spec.cols:
        whole, of = (x.x if shared else x.gathered(row)), None
        whole = torch.nn.functional.pad(whole, (0, spec.padded_cols - spec.cols)).contiguous()
    elif "quantized" in x.memo or any(part.level < 8 for part in parts):
        if "quantized" not in x.memo:
            x.memo["quantized"] = _quantized(whole, matrix)
        quantized = x.memo["quantized"]
    indices = None if of is None else of.data_ptr()
    codes = None if quantized is None else quantized.data_ptr()
    return (whole.data_ptr(), *whole.shape, indices, codes), (whole, of, quantized)


def _quantized(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Quantizes rows [T, K] to 8 bits, as the first products of experts at levels 4 and 2 take them."""
    rows, cols = x.shape
    to = torch.empty(rows * quantized_row_bytes(cols), dtype=torch.uint8)
    result = native.library().edgemoe_quantize_rows(
        *(native.threads(), ctypes.byref(matrix), x.data_ptr(), rows, cols, to.data_ptr())
    )
    if result:
        raise native.failure(result, "a layer's quantized rows")
    return to
