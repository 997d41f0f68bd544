"""Expert weights to record bytes: quantize, pack in a layout, slice into planes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from edgemoe.storage.files.unbuffered import aligned
from edgemoe.storage.formats.source_codes import Matrix, SourceCodes
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.record.planes import REST, Bytes, dequantize, quantize, quantize_narrow, rest_of, split
from edgemoe.storage.record.trimmed import trim

_PIECE = 1 << 15
"""A sixteenth of the weights quantized at a time: their float32 copies stay in a CPU's cache."""

Quantized = tuple[torch.Tensor, torch.Tensor]
"""(codes uint8 [padded_rows, padded_cols], parameters bf16 [padded_cols / group, padded_rows, 2])."""


def quantize_matrix(weight: Matrix, spec: MatrixSpec, bits: int | None = None, level: int = 8) -> Quantized:
    """Pads a [rows, cols] matrix to its spec, and quantizes it, some rows at a time, if it has no codes.

    Args:
        weight: floats, or codes, which count as floats if they have more than `bits` bits.
        spec: the sizes of the matrix.
        bits: number of bits of a code, one of offsets.BITS; the lower bits of the result's 8 are constant
            (planes.REST). None: 8 for floats; 4 for a source with codes, and `level` is 4 then.
        level: the highest level that computes the matrix, 8 or 4.
    """
    if bits is None:
        bits, level = (4, 4) if isinstance(weight, SourceCodes) else (8, 8)
    if isinstance(weight, SourceCodes) and weight.bits > bits:
        weight = weight.weights()
    if isinstance(weight, SourceCodes):
        return _keep_codes(weight, spec, bits, level)
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
        made = quantize(part, spec.group) if bits == 8 else quantize_narrow(part, spec.group, bits, level)
        codes[start:end], parameters[:, start:end] = made
    return codes, parameters


def coding(geometry: RecordGeometry, index: int, weight: Matrix) -> tuple[int, int]:
    """The bits and the highest level of a matrix's codes in a layer, for quantize_matrix.

    Floats of a store without limits take 8-bit codes in a store up to level 4 too, of which it has the upper bits.
    """
    spec = geometry.matrices[index]
    limited = geometry.bits or any(matrix.limit < 8 for matrix in geometry.matrices)
    bits = geometry.matrix_bits[index] if limited or isinstance(weight, SourceCodes) else 8
    return bits, min(spec.limit, geometry.max_level)


def _keep_codes(matrix: SourceCodes, spec: MatrixSpec, bits: int, level: int) -> Quantized:
    """Keeps the source's codes exactly, as the top `bits` bits of the 8, and rounds its parameters to bf16."""
    matrix = matrix.widened(bits).regrouped(spec.group)
    step = matrix.scale / (1 << (8 - bits))
    centre = matrix.centre + (7.5 - rest_of(bits, level)) * step
    added = spec.padded_rows - spec.rows
    codes = F.pad(matrix.codes << (8 - bits) | REST[bits], (0, spec.padded_cols - spec.cols, 0, added))
    parameters = torch.stack((16 * step, centre), -1).transpose(0, 1)
    return codes, F.pad(parameters, (0, 0, 0, added)).to(torch.bfloat16).contiguous()


def squared_error(source: Matrix, quantized: Quantized, spec: MatrixSpec, level: int) -> tuple[float, float]:
    """Compares the weights of a quantized matrix at `level`, or at its limit, with its source, some rows at a time.

    Returns:
        Sums, in float64, of the squared differences and of the source's squares.
    """
    codes, parameters = quantized
    squared = total = 0.0
    step = max(_PIECE // (16 * spec.padded_cols), 1) * 16
    for start in range(0, spec.rows, step):
        end = min(start + step, spec.rows)
        part = (
            source.rows(start, end).weights()
            if isinstance(source, SourceCodes)
            else source[start:end].float()
        )
        kept = dequantize(codes[start:end], parameters[:, start:end], min(level, spec.limit))[:, : spec.cols]
        squared += float((kept - part).square().sum(dtype=torch.float64))
        total += float(part.square().sum(dtype=torch.float64))
    return squared, total


def assemble(geometry: RecordGeometry, layout: Layout, matrices: Sequence[Quantized]) -> Bytes:
    """Builds a record, uint8 [record_bytes], BLOCK-aligned, from quantized matrices in the geometry's order.

    Args:
        geometry: the geometry of the record's layer.
        layout: the order of codes.
        matrices: codes and parameters of each matrix; the codes have as many bits as the geometry's `matrix_bits` say.
    """
    record = aligned(geometry.record_bytes)
    record.fill(0)
    p4 = np.zeros(geometry.codes_bytes, np.uint8)
    d8 = record[geometry.planes[2].offset :] if geometry.max_level == 8 else np.zeros(0, np.uint8)
    p0 = np.zeros(geometry.low_bytes, np.uint8) if geometry.is_trimmed else d8
    places = zip(geometry.matrix_offsets(), geometry.low_offsets(), matrices, strict=True)
    for (spec, parameter_at, codes_at), low_at, (codes, parameters) in places:
        raw = parameters.contiguous().view(torch.uint8).reshape(-1).numpy()
        record[parameter_at : parameter_at + spec.parameter_bytes] = raw
        low, high = (half.view(layout.pieces, -1) for half in layout.pairs(codes))
        upper = layout.cut(torch.from_numpy(p4), codes_at, spec.nibble_bytes)
        upper.copy_((low >> 4) | (high & 0xF0))
        if p0.size and spec.limit > 4:
            layout.cut(torch.from_numpy(p0), low_at, spec.nibble_bytes).copy_((low & 15) | (high << 4))
    if geometry.is_trimmed:
        trim(p0, geometry, layout, d8)
    base, d4 = split(p4)
    at = geometry.parameter_bytes
    record[at : at + base.size] = base
    if geometry.max_level >= 4:
        record[at + base.size : at + 2 * base.size] = d4
    return record
