"""Computes experts on a GPU from planes as stored: the launches of a call, and the rows that each computes.

A call takes two launches for all experts and levels, gate_up with the gating and down; four where some experts have
few tokens and some many. A gating that kernels.activation does not recognise runs between the launches, in the model's
own code. The host never waits. The number of rows of a part selects its kernel, so an answer depends neither on the
other parts of a call nor on limits.

FEW is within 2 % of the fastest of six tiles on an H100 (docs/benchmarks/2026-11-23-gpu.md), VECTOR is the best of five
in most of nine measurements (docs/benchmarks/2026-11-27-gpu-kernels.md); MATVEC_UP_TO and MANY are estimates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from edgemoe.kernels.activation import CUSTOM, Activation
from edgemoe.kernels.base import Part, Rows
from edgemoe.kernels.torch_planes import block_tensor
from edgemoe.kernels.triton.matvec import matvec, rows_per_program
from edgemoe.kernels.triton.products import ITEM, OPTIONS, Product, Tile, matmul
from edgemoe.storage.base import Blocks, Plane
from edgemoe.storage.record.layout import LAYOUTS, Layout, slab_columns
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry

MATVEC_UP_TO = 4
"""Rows of a part up to which matvec computes it, row by row."""

VECTOR = Tile(rows=8, side=8, warps=2)
"""Tile for parts of up to MATVEC_UP_TO rows."""

FEW, MANY = Tile(rows=64, tokens=16), Tile(rows=64, tokens=64)
"""Tiles for parts of up to 16 rows, and of more."""

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether the kernels of this process run in Triton's interpreter, on CPU tensors."""

_BASE, _D4, _D8 = (plane.label for plane in (Plane.BASE, Plane.D4, Plane.D8))

Item = tuple[int, int, int]
"""(part's index, first row of x, rows)."""


class TritonExpertKernel:
    """Runs experts of one geometry, from the blocks of storage.record.forms.PlaneForm. Keeps no state between calls.

    Blocks are uint8 tensors on x's device that start at multiples of 16 bytes. They must stay allocated and unchanged
    until the work that `forward` enqueues on the current stream is done.

    Args:
        geometry: the store's geometry.
        layout: the layout of resident planes: cuda.

    Raises:
        ValueError: the layout is not cuda.
    """

    def __init__(self, geometry: RecordGeometry, layout: Layout) -> None:
        if layout != LAYOUTS["cuda"]:
            raise ValueError(
                f"expected planes in layout cuda, got {layout.name}: load the planes in layout cuda"
            )
        self._geometry = geometry
        self._offsets: NDArray[np.int64] = np.array(self.plane_offsets(), np.int64)

    @property
    def inner(self) -> int:
        """The inner size I of an expert."""
        return self._geometry.matrices[1].cols

    @property
    def outer(self) -> int:
        """Size of the state that experts take."""
        return self._geometry.matrices[0].cols

    @property
    def products(self) -> int:
        """Numbers that an expert's first matrix makes of a state."""
        return self._geometry.matrices[0].rows

    @staticmethod
    def scratch_bytes(geometry: RecordGeometry) -> int:
        """Bytes of scratch per kernel: 0, since weights exist in registers only."""
        return 0

    def forward(self, x: Rows, parts: Sequence[Part], activation: Activation, out: torch.Tensor) -> None:
        """Implements ExpertKernel.forward: enqueues on the current stream of x's device, without waiting."""
        up, down = self._geometry.matrices
        fused = activation.name != CUSTOM
        inner = down.cols if fused else up.rows
        launches = list(launches_of(parts))
        tables = self._tables(parts, [item for _, items in launches for item in items], x.x.device)
        rows = x.gathered(len(out))
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        with torch.cuda.device_of(rows):
            y = _products(rows, tables[0], launches, launch_shape(up, inner, activation.name))
            y = y if fused else activation.apply(y).contiguous()
            out.copy_(_products(y, tables[1], launches, launch_shape(down, down.rows, CUSTOM)))

    def items_at(self, blocks: Blocks, level: int) -> NDArray[np.int64]:
        """The items of an expert's two matrices but for their last two numbers, for `launch_rows`: int64 [2, 6].

        Args:
            blocks: the expert's blocks, on the device.
            level: the level that it is computed at; higher planes are not read.
        """
        addresses = self._addresses([Part(blocks, level, level, 1)])[:, 0]
        return np.concatenate((addresses, np.minimum(level, self._offsets[:, 5:])), 1)

    def plane_offsets(self) -> list[list[int]]:
        """Bytes from a plane's start to each address of an item: base twice, d4, d8 twice; for gate_up and down.

        The sixth number of each is the highest level that computes the matrix.
        """
        codes, half = self._geometry.parameter_bytes, self._geometry.low_bytes // 2
        places = zip(self._geometry.matrix_offsets(), self._geometry.low_offsets(), strict=True)
        return [
            [at, codes + codes_at // 2, codes_at // 2, low_at // 2, half + low_at // 2, spec.limit]
            for (spec, at, codes_at), low_at in places
        ]

    def launch_rows(
        self,
        table: torch.Tensor,
        x: torch.Tensor,
        activation: Activation,
        inner: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Launches up to R experts for the same row of x, by kernels that a graph can hold.

        Args:
            table: int64 [2, R, ITEM] on the device, items of gate_up and of down; an item of level 0 computes nothing.
            x: bf16 [H].
            activation: the experts' activation; a CUSTOM one takes the rows of all R items.
            inner: bf16 [R, I], scratch.
            out: bf16 [R, H].
        """
        up, down = self._geometry.matrices
        fused = activation.name != CUSTOM
        first = inner if fused else x.new_empty(len(inner), up.rows)
        _launch_rows(table[0], x, 0, first, launch_shape(up, first.shape[1], activation.name))
        if not fused:
            inner.copy_(activation.apply(first))
        _launch_rows(table[1], inner, inner.shape[1], out, launch_shape(down, down.rows, CUSTOM))

    def _tables(self, parts: Sequence[Part], items: Sequence[Item], device: torch.device) -> torch.Tensor:
        """The items of both launches: int64 [2, items, ITEM] on the device, for gate_up and down."""
        part, row, rows = np.array(items, np.int64).reshape(-1, 3).T
        levels = np.array([each.level for each in parts], np.int64)[part]
        numbers = np.empty((2, len(part), ITEM), np.int64)
        numbers[..., :5] = self._addresses(parts)[:, part]
        numbers[..., 5] = np.minimum(levels, self._offsets[:, 5:])
        numbers[..., 6], numbers[..., 7] = row, rows
        table = torch.from_numpy(numbers)
        if device.type == "cpu":
            return table
        return table.pin_memory().to(device, non_blocking=True)

    def _addresses(self, parts: Sequence[Part]) -> NDArray[np.int64]:
        """Addresses of each part's parameters, base, d4 and d8's halves, for both matrices: int64 [2, parts, 5].

        0 for planes above its level.
        """
        starts = np.array([_starts(part) for part in parts], np.int64).reshape(-1, 5)
        return np.where(starts, starts + self._offsets[:, None, :5], 0)


def _starts(part: Part) -> tuple[int, int, int, int, int]:
    """Where the planes of each address of an item start; 0 for planes above the part's level."""
    blocks, level = part.blocks, part.level
    base = block_tensor(blocks[_BASE]).data_ptr()
    d4 = block_tensor(blocks[_D4]).data_ptr() if level >= 4 else 0
    d8 = block_tensor(blocks[_D8]).data_ptr() if level >= 8 else 0
    return base, base, d4, d8, d8


def launches_of(parts: Sequence[Part]) -> Iterable[tuple[Tile, list[Item]]]:
    """Assigns the rows of parts to tiles, by the number of rows of a part; each tile takes one launch.

    Args:
        parts: the rows of experts, one part after another.

    Returns:
        (tile, its items) for each tile that computes rows.
    """
    by_tile: dict[Tile, list[Item]] = {}
    first = 0
    for index, part in enumerate(parts):
        tile = VECTOR if part.rows <= MATVEC_UP_TO else FEW if part.rows <= FEW.tokens else MANY
        items = by_tile.setdefault(tile, [])
        for row in range(0, part.rows, tile.tokens):
            items.append((index, first + row, min(tile.tokens, part.rows - row)))
        first += part.rows
    return by_tile.items()


def launch_shape(spec: MatrixSpec, out: int, gating: str) -> Product:
    """The compile-time constants of a launch for a matrix, with `out` elements per row of y."""
    slab = slab_columns(spec.padded_cols)
    return Product(out, spec.cols, spec.padded_rows, spec.padded_cols // slab, slab // 4, spec.group, gating)


def _launch_rows(items: torch.Tensor, x: torch.Tensor, stride: int, y: torch.Tensor, shape: Product) -> None:
    """Launches a matrix of up to R experts, items int64 [R, ITEM], each for one row of x, into its row of y."""
    grid = (triton.cdiv(shape.out, rows_per_program(shape, VECTOR)), len(items))
    matvec[grid](items, x, stride, y, shape, VECTOR, num_warps=VECTOR.warps, **OPTIONS)


def _products(
    x: torch.Tensor, table: torch.Tensor, launches: Sequence[tuple[Tile, list[Item]]], product: Product
) -> torch.Tensor:
    """bf16 [R, product.out]: the products of all items of a table [items, ITEM], in one launch per tile."""
    rows = sum(rows for _, items in launches for _, _, rows in items)
    y = x.new_empty(rows, product.out)
    done = 0
    for tile, items in launches:
        arguments = (table[done : done + len(items)], x, x.stride(0), y, product, tile)
        if tile is VECTOR:
            grid = (triton.cdiv(product.out, rows_per_program(product, tile)), len(items))
            matvec[grid](*arguments, num_warps=tile.warps, **OPTIONS)
        else:
            grid = (triton.cdiv(product.out, tile.rows), len(items))
            operand = tl.float32 if INTERPRETED else tl.bfloat16
            matmul[grid](*arguments, operand, num_warps=tile.warps, **OPTIONS)
        done += len(items)
    return y
