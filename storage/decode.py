"""Weights of a record's prefix in plain torch: the reference of every kernel, form and layout, and slow."""

from __future__ import annotations

import numpy as np
import torch

from storage.encode import Quantized
from storage.layout import Layout
from storage.planes import Bytes, dequantize, merge, midpoint
from storage.record import MatrixSpec, RecordGeometry


def unpack_codes(record: Bytes, geometry: RecordGeometry, layout: Layout, level: int) -> list[Quantized]:
    """Extracts the codes and parameters of every matrix from a record's prefix; bits past `level` are zero.

    Args:
        record: at least prefix_bytes(level) bytes of a record.
        geometry: of the record's store.
        layout: of the record.
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
        spans = layout.spans(codes_at, spec.nibble_bytes, geometry.codes_bytes)

        def nibbles(array: Bytes, spans: list[slice] = spans, spec: MatrixSpec = spec) -> torch.Tensor:
            packed = torch.from_numpy(np.concatenate([array[span] for span in spans]))
            return layout.unpack(packed, spec.padded_rows, spec.padded_cols)

        codes = nibbles(p4) << 4
        if level == 8:
            codes |= nibbles(record[geometry.planes[2].offset :])
        raw = record[parameter_at : parameter_at + spec.parameter_bytes].copy()
        shape = (spec.padded_cols // spec.group, spec.padded_rows, 2)
        out.append((codes, torch.from_numpy(raw).view(torch.bfloat16).view(shape)))
    return out


def decode(record: Bytes, geometry: RecordGeometry, layout: Layout, level: int) -> list[torch.Tensor]:
    """Computes the float32 [rows, cols] matrices of a record at `level`."""
    matrices = unpack_codes(record, geometry, layout, level)
    return [
        dequantize(codes, parameters, level)[: spec.rows, : spec.cols]
        for spec, (codes, parameters) in zip(geometry.matrices, matrices, strict=True)
    ]
