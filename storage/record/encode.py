"""Expert weights to record bytes: quantize, pack in a layout, slice into planes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from edgemoe.storage.files.unbuffered import aligned
from edgemoe.storage.formats.base import FourBit, Matrix
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.record.planes import Bytes, dequantize, quantize, split

_PIECE = 1 << 15
"""A sixteenth of the weights quantized at a time: their float32 copies stay in a CPU's cache."""

Quantized = tuple[torch.Tensor, torch.Tensor]
"""(codes uint8 [padded_rows, padded_cols], parameters bf16 [padded_cols / group, padded_rows, 2])."""


def quantize_matrix(weight: Matrix, spec: MatrixSpec) -> Quantized:
    """Pads a [rows, cols] matrix to its spec, and quantizes it, some rows at a time, if it has no 4-bit codes."""
    if isinstance(weight, FourBit):
        return _keep_codes(weight, spec)
    rows, cols = spec.padded_rows, spec.padded_cols
    codes = torch.empty(rows, cols, dtype=torch.uint8)
    parameters = torch.empty(cols // spec.group, rows, 2, dtype=torch.bfloat16)
    # A multiple of 16, so that the last piece has at least one row of the source.
    step = max(_PIECE // cols, 1) * 16
    for start in range(0, rows, step):
        end = min(start + step, rows)
        part = weight[start:end].float()
        if part.shape != (end - start, cols):
            part = F.pad(part, (0, cols - spec.cols, 0, end - start - part.shape[0]))
        codes[start:end], parameters[:, start:end] = quantize(part, spec.group)
    return codes, parameters


def _keep_codes(matrix: FourBit, spec: MatrixSpec) -> Quantized:
    """Keeps the source's codes exactly, as code >> 4, and rounds its parameters to bf16."""
    assert matrix.group == spec.group, (matrix.group, spec)
    added = spec.padded_rows - spec.rows
    codes = F.pad(matrix.codes << 4, (0, spec.padded_cols - spec.cols, 0, added))
    parameters = torch.stack((matrix.scale, matrix.centre), -1).transpose(0, 1)
    return codes, F.pad(parameters, (0, 0, 0, added)).to(torch.bfloat16).contiguous()


def squared_error(source: Matrix, quantized: Quantized, spec: MatrixSpec, level: int) -> tuple[float, float]:
    """Compares the weights of a quantized matrix at `level` with its source, some rows at a time.

    Returns:
        Sums, in float64, of the squared differences and of the source's squares.
    """
    codes, parameters = quantized
    squared = total = 0.0
    step = max(_PIECE // (16 * spec.padded_cols), 1) * 16
    for start in range(0, spec.rows, step):
        end = min(start + step, spec.rows)
        part = source.rows(start, end).weights() if isinstance(source, FourBit) else source[start:end].float()
        kept = dequantize(codes[start:end], parameters[:, start:end], level)[:, : spec.cols]
        squared += float((kept - part).square().sum(dtype=torch.float64))
        total += float(part.square().sum(dtype=torch.float64))
    return squared, total


def assemble(geometry: RecordGeometry, layout: Layout, matrices: Sequence[Quantized]) -> Bytes:
    """Builds a record, uint8 [record_bytes], BLOCK-aligned, from quantized matrices in the geometry's order."""
    record = aligned(geometry.record_bytes)
    record.fill(0)
    p4 = np.zeros(geometry.codes_bytes, np.uint8)
    p0 = record[geometry.planes[2].offset :] if geometry.max_level == 8 else np.zeros(0, np.uint8)
    places = geometry.matrix_offsets()
    for (spec, parameter_at, codes_at), (codes, parameters) in zip(places, matrices, strict=True):
        raw = parameters.contiguous().view(torch.uint8).reshape(-1).numpy()
        record[parameter_at : parameter_at + spec.parameter_bytes] = raw
        low, high = (half.view(layout.pieces, -1) for half in layout.pairs(codes))
        upper = layout.cut(torch.from_numpy(p4), codes_at, spec.nibble_bytes)
        upper.copy_((low >> 4) | (high & 0xF0))
        if p0.size:
            layout.cut(torch.from_numpy(p0), codes_at, spec.nibble_bytes).copy_((low & 15) | (high << 4))
    base, d4 = split(p4)
    at = geometry.parameter_bytes
    record[at : at + base.size] = base
    if geometry.max_level >= 4:
        record[at + base.size : at + 2 * base.size] = d4
    return record
