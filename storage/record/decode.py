"""Codes and weights of a record's prefix: the reference of every kernel, form and layout."""

from __future__ import annotations

import numpy as np
import torch

from edgemoe.storage.record.encode import Quantized
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.record.planes import Bytes, dequantize, merge, midpoint
from edgemoe.storage.record.trimmed import expand


class RecordCodes:
    """Extracts codes and parameters from records into arrays that every call overwrites; for one thread.

    Args:
        geometry: the geometry of the records' store.
        layout: the layout of the records.
    """

    def __init__(self, geometry: RecordGeometry, layout: Layout) -> None:
        self._geometry, self._layout = geometry, layout
        self._p4 = np.empty(geometry.codes_bytes, np.uint8)
        self._p0 = np.empty(geometry.low_bytes, np.uint8)
        shapes = [(spec.padded_rows, spec.padded_cols) for spec in geometry.matrices]
        self._codes = [torch.empty(shape, dtype=torch.uint8) for shape in shapes]

    def unpack(self, record: Bytes, level: int, layer: int | None = None) -> list[Quantized]:
        """Extracts every matrix's codes, 0..255 at level 8 and 0..15 below, and its parameters.

        A code at level 2 is the middle of the codes at level 4 that it stands for, 4 * (code >> 6) + 1. A matrix whose
        limit is below `level` has the codes of its limit.

        Args:
            record: uint8, at least the prefix_bytes(level) bytes of a record.
            level: 8, 4 or 2, at most the highest level of the layer.
            layer: the number of the record's layer; None: its matrices have as many bits as the store's limits allow.

        Returns:
            Codes and parameters of gate_up and down. The next call overwrites the codes.
        """
        geometry = self._geometry if layer is None else self._geometry.of_layer(layer)
        at, half = geometry.parameter_bytes, geometry.codes_bytes // 2
        self._p4[half:] = record[at : at + half]
        if level == 2:
            midpoint(self._p4)
        else:
            self._p4[:half] = record[at + half : at + 2 * half]
            merge(self._p4)
        if level == 8:
            p0 = record[geometry.planes[2].offset : geometry.planes[2].end]
            if geometry.is_trimmed:
                expand(p0, geometry, self._layout, self._p0)
                p0 = self._p0
        out = []
        places = zip(geometry.matrix_offsets(), geometry.low_offsets(), self._codes, strict=True)
        for (spec, parameters_at, codes_at), low_at, codes in places:
            self._nibbles(self._p4, codes_at, spec, codes)
            if min(level, spec.limit) == 8:
                codes.bitwise_left_shift_(4).bitwise_or_(self._nibbles(p0, low_at, spec))
            raw = record[parameters_at : parameters_at + spec.parameter_bytes].copy()
            shape = (spec.padded_cols // spec.group, spec.padded_rows, 2)
            out.append((codes, torch.from_numpy(raw).view(torch.bfloat16).view(shape)))
        return out

    def _nibbles(
        self, array: Bytes, at: int, spec: MatrixSpec, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        pieces = self._layout.cut(torch.from_numpy(array), at, spec.nibble_bytes)
        return self._layout.unpack(pieces, spec.padded_rows, spec.padded_cols, out)


def decode(
    record: Bytes, geometry: RecordGeometry, layout: Layout, level: int, layer: int | None = None
) -> list[torch.Tensor]:
    """Computes the float32 [rows, cols] matrices of a record at `level`, or at their limits.

    Args:
        record: uint8, at least the prefix_bytes(level) bytes of a record.
        geometry: the geometry of the store.
        layout: the order of the record's codes.
        level: 8, 4 or 2, at most the highest level of the layer.
        layer: the number of the record's layer; None: its matrices have as many bits as the store's limits allow.

    Returns:
        gate_up and down, each float32 [rows, cols].
    """
    out = []
    matrices = RecordCodes(geometry, layout).unpack(record, level, layer)
    for spec, (codes, parameters) in zip(geometry.matrices, matrices, strict=True):
        own = min(level, spec.limit)
        weights = dequantize(codes if own == 8 else codes << 4, parameters, own)
        out.append(weights[: spec.rows, : spec.cols])
    return out
