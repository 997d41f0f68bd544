"""edgemoe's own CPU kernel: products with planes as they lie, by native.c.

The shared library is built where a C compiler is found when edgemoe is installed, and used where the processor
has AVX2; elsewhere torch's operators do the same work (cpu.py). Few tokens are multiplied with integers as
they come out of the planes; many are cheaper with the weights dequantized once and an ordinary product. Which
way is taken depends on the number of tokens only, never on what is resident, so an answer does not depend
on limits.
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
from storage.base import Plane
from storage.layout import LAYOUTS, Layout
from storage.record import MatrixSpec, RecordGeometry

LAYOUT = LAYOUTS["cpu-avx2"]
"""What the kernel reads, whatever layout torch's own would want."""

DEQUANTIZE_FROM = {8: 40, 4: 64, 2: 64}
"""level -> tokens at one expert from which dequantizing pays (docs/decisions/0008)."""

DENSE_UP_TO = 64
"""Rows up to which a dense product here beats converting the weight and torch's."""

_PAD_TOKENS = 8
"""Tokens are padded to a multiple of this before a plain product: every unseen shape costs some setting up."""


class _Matrix(ctypes.Structure):
    """`matrix` in native.c."""

    _fields_ = tuple(
        (name, ctypes.c_int64) for name in ("rows", "cols", "group", "parameters_at", "codes_at", "half")
    )


class _Expert(ctypes.Structure):
    """`expert` in native.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parameters", "base", "d4", "d8")),
        *((name, ctypes.c_int64) for name in ("level", "x", "y", "tokens")),
    )


@cache
def _library() -> Any:
    """The shared library, or None where there is none or the processor cannot run it."""
    found = importlib.util.find_spec("edgemoe.kernels._native")
    if found is None or found.origin is None:
        return None
    library = ctypes.CDLL(found.origin)
    if not library.edgemoe_supported():
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.edgemoe_open.restype = pointer
    library.edgemoe_open.argtypes = [ctypes.c_int]
    library.edgemoe_close.argtypes = [pointer]
    library.edgemoe_expert_product.argtypes = [pointer, pointer, pointer, size, pointer, size, pointer]
    library.edgemoe_expert_weights.argtypes = [pointer, pointer, pointer, pointer]
    library.edgemoe_rms_norm.argtypes = [pointer, pointer, ctypes.c_float, size, size, pointer]
    library.edgemoe_rms_norm.restype = None
    library.edgemoe_dense_product.argtypes = [pointer, pointer, pointer, size, size, pointer, size, pointer]
    return library


def available() -> bool:
    """Whether this process can use the kernel."""
    return _library() is not None


@cache
def _threads() -> int:
    """The address of the threads that all products of this process share; as many as torch uses."""
    threads = torch.get_num_threads()
    opened: int | None = _library().edgemoe_open(threads)
    if opened is None:
        raise OSError(f"{threads} threads for products were wanted, and the system gave none")
    return opened


# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=_threads.cache_clear)


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
    if _library().edgemoe_dense_product(
        _threads(), weight.data_ptr(), scales, rows, cols, x.data_ptr(), x.shape[0], y.data_ptr()
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
    _library().edgemoe_rms_norm(
        x.data_ptr(), weight.data_ptr(), epsilon, x.numel() // cols, cols, y.data_ptr()
    )
    return y


class NativeExpertKernel:
    """Runs experts of one geometry. Not thread-safe: it owns scratch memory, counted by scratch_bytes.

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
                _Matrix(spec.padded_rows, spec.padded_cols, spec.group, at, codes, geometry.codes_bytes // 2),
            )
            for spec, at, codes in geometry.matrix_offsets()
        ]
        self._weights = torch.empty(max(spec.padded_rows * spec.padded_cols for spec in geometry.matrices))

    @staticmethod
    def scratch_bytes(geometry: RecordGeometry) -> int:
        """Bytes of scratch that one kernel holds, with the activations that its threads share."""
        widest = max(spec.padded_rows * spec.padded_cols for spec in geometry.matrices)
        columns = max(spec.padded_cols for spec in geometry.matrices)
        return widest * 4 + max(DEQUANTIZE_FROM.values()) * columns * 4

    def forward(self, x: torch.Tensor, parts: Sequence[Part], gate: Activation) -> torch.Tensor:
        """See ExpertKernel."""
        experts = (_Expert * len(parts))(*(self._expert(part) for part in parts))
        up, down = self._matrices
        return self._product(gate(self._product(x, parts, experts, *up)), parts, experts, *down)

    def _expert(self, part: Part) -> _Expert:
        blocks, level = part.blocks, part.level
        base = _address(blocks[Plane.BASE.label])
        d4 = _address(blocks[Plane.D4.label]) if level > 2 else None
        d8 = _address(blocks[Plane.D8.label]) if level > 4 else None
        return _Expert(base, base + self._geometry.parameter_bytes, d4, d8, level, 0, 0, part.rows)

    def _product(
        self, x: torch.Tensor, parts: Sequence[Part], experts: Any, spec: MatrixSpec, matrix: _Matrix
    ) -> torch.Tensor:
        """bf16 [R, K] -> bf16 [R, N] through one quantized matrix of every part's expert."""
        shared = x.stride(0) == 0
        if spec.padded_cols != spec.cols:
            x = torch.nn.functional.pad(x[:1] if shared else x, (0, spec.padded_cols - spec.cols))
        y = x.new_empty(sum(part.rows for part in parts), matrix.rows)
        few, row = [], 0
        for part, expert in zip(parts, experts, strict=True):
            expert.x, expert.y = 0 if shared else row, row
            if part.rows < DEQUANTIZE_FROM[part.level]:
                few.append(expert)
            else:
                y[row : row + part.rows] = self._by_weights(x[row : row + part.rows], expert, matrix)
            row += part.rows
        if few:
            chosen = experts if len(few) == len(parts) else (_Expert * len(few))(*few)
            self._by_planes(x[:1] if shared else x.contiguous(), chosen, matrix, y)
        return y if spec.padded_rows == spec.rows else y[:, : spec.rows]

    def _by_planes(self, x: torch.Tensor, experts: Any, matrix: _Matrix, y: torch.Tensor) -> None:
        if _library().edgemoe_expert_product(
            _threads(), ctypes.byref(matrix), experts, len(experts), x.data_ptr(), x.shape[0], y.data_ptr()
        ):
            raise MemoryError("no memory for a product's activations")

    def _by_weights(self, x: torch.Tensor, expert: _Expert, matrix: _Matrix) -> torch.Tensor:
        """bf16 [T, K] -> float32 [T, N] through a dequantized [K, N] matrix; products in float32."""
        weights = self._weights[: matrix.rows * matrix.cols].view(matrix.cols, matrix.rows)
        _library().edgemoe_expert_weights(
            _threads(), ctypes.byref(matrix), ctypes.byref(expert), weights.data_ptr()
        )
        tokens = x.shape[0]
        padded = torch.nn.functional.pad(x, (0, 0, 0, -tokens % _PAD_TOKENS)).float()
        return (padded @ weights)[:tokens]


def _address(block: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(block))
