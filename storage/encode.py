"""Expert weights to record bytes and back: quantize, pack in a layout, slice into planes.

`decode` is the plain reference for everything that reads a record: kernels, forms and other layouts are
tested against it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from storage.layout import Layout
from storage.planes import Bytes, dequantize, merge, midpoint, quantize, split
from storage.record import MatrixSpec, RecordGeometry

Quantized = tuple[torch.Tensor, torch.Tensor]
"""(codes uint8 [padded_rows, padded_cols], parameters bf16 [padded_cols / group, padded_rows, 2])."""


def quantize_matrix(weight: torch.Tensor, spec: MatrixSpec) -> Quantized:
    """Pads a floating-point [rows, cols] matrix with zeros to its spec and quantizes it."""
    padding = (0, spec.padded_cols - spec.cols, 0, spec.padded_rows - spec.rows)
    return quantize(F.pad(weight.float(), padding), spec.group)


def assemble(geometry: RecordGeometry, layout: Layout, matrices: Sequence[Quantized]) -> Bytes:
    """The record (uint8 [record_bytes]) of an expert whose matrices are quantized, in geometry's order."""
    record = np.zeros(geometry.record_bytes, np.uint8)
    p4 = np.zeros(geometry.codes_bytes, np.uint8)
    p0 = record[geometry.planes[2].offset :] if geometry.max_level == 8 else np.zeros(0, np.uint8)
    for (spec, parameter_at, codes_at), (codes, parameters) in zip(
        geometry.matrix_offsets(), matrices, strict=True
    ):
        raw = parameters.contiguous().view(torch.uint8).reshape(-1).numpy()
        record[parameter_at : parameter_at + spec.parameter_bytes] = raw
        p4[codes_at : codes_at + spec.nibble_bytes] = layout.pack(codes >> 4).numpy()
        if p0.size:
            p0[codes_at : codes_at + spec.nibble_bytes] = layout.pack(codes & 15).numpy()
    base, d4 = split(p4)
    at = geometry.parameter_bytes
    record[at : at + base.size] = base
    if geometry.max_level >= 4:
        record[at + base.size : at + 2 * base.size] = d4
    return record


def encode(geometry: RecordGeometry, layout: Layout, weights: Sequence[torch.Tensor]) -> Bytes:
    """The record of an expert from its floating-point matrices [rows, cols], in geometry's order."""
    quantized = [quantize_matrix(w, spec) for w, spec in zip(weights, geometry.matrices, strict=True)]
    return assemble(geometry, layout, quantized)


def unpack_codes(record: Bytes, geometry: RecordGeometry, layout: Layout, level: int) -> list[Quantized]:
    """The codes and parameters a record's prefix holds; bits below `level` are zero.

    Args:
        record: at least prefix_bytes(level) bytes of a record.
        geometry: of the store the record is from.
        layout: that the record is packed in.
        level: 8, 4 or 2.
    """
    at, half = geometry.parameter_bytes, geometry.codes_bytes // 2
    p4 = np.zeros(geometry.codes_bytes, np.uint8)
    p4[half:] = record[at : at + half]
    if level == 2:
        midpoint(p4)
        p4 &= 0xCC
    else:
        p4[:half] = record[at + half : at + 2 * half]
        merge(p4)
    out = []
    for spec, parameter_at, codes_at in geometry.matrix_offsets():

        def nibbles(array: Bytes, at: int = codes_at, spec: MatrixSpec = spec) -> torch.Tensor:
            packed = torch.from_numpy(array[at : at + spec.nibble_bytes].copy())
            return layout.unpack(packed, spec.padded_rows, spec.padded_cols)

        codes = nibbles(p4) << 4
        if level == 8:
            codes |= nibbles(record[geometry.planes[2].offset :])
        raw = record[parameter_at : parameter_at + spec.parameter_bytes].copy()
        shape = (spec.padded_cols // spec.group, spec.padded_rows, 2)
        out.append((codes, torch.from_numpy(raw).view(torch.bfloat16).view(shape)))
    return out


def decode(record: Bytes, geometry: RecordGeometry, layout: Layout, level: int) -> list[torch.Tensor]:
    """The float32 [rows, cols] matrices that a record stands for at `level`. The reference; slow."""
    matrices = unpack_codes(record, geometry, layout, level)
    return [
        dequantize(codes, parameters, level)[: spec.rows, : spec.cols]
        for spec, (codes, parameters) in zip(geometry.matrices, matrices, strict=True)
    ]
