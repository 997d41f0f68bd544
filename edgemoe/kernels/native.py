"""edgemoe's own CPU kernel: products with planes as they lie, by the C files of avx2/.

The shared library is built where a C compiler is found when edgemoe is installed, and used where the processor
has AVX2; elsewhere torch's operators do the same work (cpu.py). However many tokens there are, sums over their
numbers are exact integers and rounded in one order, so a token's result is the same bit for bit alone or among
others, and an answer does not depend on limits.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from edgemoe.kernels.base import Activation, Part
from edgemoe.kernels.gating import gating_of
from storage.base import Blocks, Plane
from storage.layout import LAYOUTS, Layout
from storage.record import MatrixSpec, RecordGeometry

_INTERFACE = 7
"""Goes up with every change of a function or structure of the C files: a library built before is left alone."""

LAYOUT = LAYOUTS["cpu-avx2-paired"]
"""What the kernel reads, whatever layout torch's own would want."""

DENSE_BF16_UP_TO = 128
"""Rows up to which a product with a bf16 weight here beats converting the weight and torch's; with int8 any do."""

_FEWEST_COLUMNS = 32
"""That share a scale: a group's, and at most 64."""

_BASE, _D4, _D8 = (plane.label for plane in Plane)

MOST_ROWS = 512
"""Rows of a call that scratch_bytes counts on; more take more memory while they are computed."""


class _Matrix(ctypes.Structure):
    """`matrix` in avx2/planes.h."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("rows", "cols", "group", "parameters_at", "codes_at", "half")
    )


class _Expert(ctypes.Structure):
    """`expert` in avx2/planes.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parameters", "base", "d4", "d8")),
        *((name, ctypes.c_int64) for name in ("level", "x", "y", "tokens")),
    )


@cache
def library() -> Any:
    """The shared library, or None where there is none or the processor cannot run it."""
    found = importlib.util.find_spec("edgemoe.kernels._native")
    if found is None or found.origin is None:
        return None
    loaded = ctypes.CDLL(found.origin)
    supported = getattr(loaded, f"edgemoe_supported_{_INTERFACE}", None)
    if supported is None or not supported():
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    loaded.edgemoe_open.restype = pointer
    loaded.edgemoe_open.argtypes = [ctypes.c_int]
    loaded.edgemoe_close.argtypes = [pointer]
    loaded.edgemoe_expert_product.argtypes = [pointer, pointer, pointer, size, pointer, size, pointer]
    loaded.edgemoe_experts.argtypes = [
        pointer,
        pointer,
        pointer,
        size,
        pointer,
        size,
        pointer,
        size,
        pointer,
        size,
    ]
    loaded.edgemoe_weighted_sum.argtypes = [pointer, pointer, size, size, ctypes.c_int, pointer]
    loaded.edgemoe_weighted_sum.restype = None
    loaded.edgemoe_rms_norm.argtypes = [pointer, pointer, ctypes.c_float, size, size, pointer]
    loaded.edgemoe_rms_norm.restype = None
    loaded.edgemoe_attention.argtypes = [pointer] * 7
    loaded.edgemoe_up_to_experts.argtypes = [pointer] * 8
    loaded.edgemoe_route.argtypes = [pointer] * 5
    loaded.edgemoe_route.restype = None
    loaded.edgemoe_choose.argtypes = [pointer] * 7
    loaded.edgemoe_dense_product.argtypes = [pointer, pointer, pointer, size, size, pointer, size, pointer]
    return loaded


def available() -> bool:
    """Whether this process can use the kernel."""
    return library() is not None


@cache
def thread_count() -> int:
    """How many threads products of this process have: as many as torch's operators when this is first asked."""
    return torch.get_num_threads()


@cache
def threads() -> int:
    """The address of the threads that all products of this process share."""
    opened: int | None = library().edgemoe_open(thread_count())
    if opened is None:
        raise OSError(f"{thread_count()} threads for products were wanted, and the system gave none")
    return opened


# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=threads.cache_clear)


def dense_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """x W^T, accumulated in float32.

    Args:
        x: bf16 [T, K], contiguous.
        weight: [N, K], contiguous: bf16, or int8 with `scale`.
        scale: bf16 [N], of an int8 weight's rows.

    Returns:
        bf16 [T, N].

    Raises:
        MemoryError: no memory for a copy of x.
    """
    rows, cols = weight.shape
    y = x.new_empty(x.shape[0], rows)
    scales = None if scale is None else scale.data_ptr()
    if library().edgemoe_dense_product(
        threads(), weight.data_ptr(), scales, rows, cols, x.data_ptr(), x.shape[0], y.data_ptr()
    ):
        raise MemoryError("no memory for a product's activations")
    return y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, rounded where transformers rounds.

    Args:
        x: bf16 [..., K], contiguous.
        weight: bf16 [K].
        epsilon: above 0.

    Returns:
        bf16 [..., K].
    """
    y = torch.empty_like(x)
    cols = weight.numel()
    library().edgemoe_rms_norm(
        x.data_ptr(), weight.data_ptr(), epsilon, x.numel() // cols, cols, y.data_ptr()
    )
    return y


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor, plus: torch.Tensor | None = None) -> torch.Tensor:
    """Sum over k of weights [k] * rows [k, H], in float32 and in this order.

    Args:
        rows: bf16 [k, H], contiguous.
        weights: float32, k in all, contiguous.
        plus: bf16, H in all, contiguous: the sum, rounded, is added to it in place.

    Returns:
        bf16 [H], or `plus`.
    """
    out = rows.new_empty(rows.shape[1]) if plus is None else plus
    library().edgemoe_weighted_sum(
        rows.data_ptr(), weights.data_ptr(), *rows.shape, plus is not None, out.data_ptr()
    )
    return out


class NativeExpertKernel:
    """Runs experts of one geometry.

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
        if library().edgemoe_experts(
            *(threads(), ctypes.byref(up), ctypes.byref(down_matrix), down.cols, experts, len(experts)),
            *(x.data_ptr(), x.shape[0], y.data_ptr(), y.shape[0]),
        ):
            raise MemoryError("no memory for experts' activations")

    def _expert(self, blocks: Blocks, level: int, rows: int) -> _Expert:
        base = address(blocks[_BASE])
        d4 = address(blocks[_D4]) if level > 2 else None
        d8 = address(blocks[_D8]) if level > 4 else None
        return _Expert(base, base + self._geometry.parameter_bytes, d4, d8, level, 0, 0, rows)

    def _product(
        self, x: torch.Tensor, parts: Sequence[Part], experts: Any, spec: MatrixSpec, matrix: _Matrix
    ) -> torch.Tensor:
        """bf16 [R, K] -> bf16 [R, N] through one quantized matrix of every part's expert."""
        x = _laid_out(x, spec, parts, experts)
        y = x.new_empty(sum(part.rows for part in parts), matrix.rows)
        if library().edgemoe_expert_product(
            threads(), ctypes.byref(matrix), experts, len(experts), x.data_ptr(), x.shape[0], y.data_ptr()
        ):
            raise MemoryError("no memory for a product's activations")
        return y if spec.padded_rows == spec.rows else y[:, : spec.rows]


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


def address(block: memoryview) -> int:
    """Where a block of an arena lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block))
