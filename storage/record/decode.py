"""Codes and weights of a record's prefix: the reference of every kernel, form and layout."""

from __future__ import annotations

import numpy as np
import torch

from edgemoe.storage.record.encode import Quantized
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.record.planes import Bytes, dequantize, merge, midpoint


class RecordCodes:
    """Extracts codes and parameters from records into arrays that every call overwrites; for one thread.

    Args:
        geometry: the geometry of the records' store.
        layout: the layout of the records.
    """

    def __init__(self, geometry: RecordGeometry, layout: Layout) -> None:
        self._geometry, self._layout = geometry, layout
        self._p4 = np.empty(geometry.codes_bytes, np.uint8)
        shapes = [(spec.padded_rows, spec.padded_cols) for spec in geometry.matrices]
        self._codes = [torch.empty(shape, dtype=torch.uint8) for shape in shapes]

    def unpack(self, record: Bytes, level: int) -> list[Quantized]:
        """Extracts every matrix's codes, 0..255 at level 8 and 0..15 below, and its parameters.

        A code of level 2 is the middle of level 4's, 4 * (code >> 6) + 1.

        Args:
            record: at least prefix_bytes(level) bytes of a record.
            level: 8, 4 or 2.
        """
        geometry = self._geometry
        at, half = geometry.parameter_bytes, geometry.codes_bytes // 2
        self._p4[half:] = record[at : at + half]
        if level == 2:
            midpoint(self._p4)
        else:
            self._p4[:half] = record[at + half : at + 2 * half]
            merge(self._p4)
        out = []
        for (spec, parameters_at, codes_at), codes in zip(
            geometry.matrix_offsets(), self._codes, strict=True
        ):
            self._nibbles(self._p4, codes_at, spec, codes)
            if level == 8:
                p0 = record[geometry.planes[2].offset : geometry.planes[2].end]
                codes.bitwise_left_shift_(4).bitwise_or_(self._nibbles(p0, codes_at, spec))
            raw = record[parameters_at : parameters_at + spec.parameter_bytes].copy()
            shape = (spec.padded_cols // spec.group, spec.padded_rows, 2)
            out.append((codes, torch.from_numpy(raw).view(torch.bfloat16).view(shape)))
        return out

    def _nibbles(
        self, array: Bytes, at: int, spec: MatrixSpec, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        pieces = self._layout.cut(torch.from_numpy(array), at, spec.nibble_bytes)
        return self._layout.unpack(pieces, spec.padded_rows, spec.padded_cols, out)


def decode(record: Bytes, geometry: RecordGeometry, layout: Layout, level: int) -> list[torch.Tensor]:
    """Computes the float32 [rows, cols] matrices of a record at `level`."""
    matrices = RecordCodes(geometry, layout).unpack(record, level)
    return [
        dequantize(codes if level == 8 else codes << 4, parameters, level)[: spec.rows, : spec.cols]
        for spec, (codes, parameters) in zip(geometry.matrices, matrices, strict=True)
    ]
