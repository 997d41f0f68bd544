"""Records from weights."""

from __future__ import annotations

from collections.abc import Sequence

from edgemoe.storage.formats.source_codes import Matrix
from edgemoe.storage.record.encode import assemble, quantize_matrix
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.record.planes import Bytes


def encode(geometry: RecordGeometry, layout: Layout, weights: Sequence[Matrix]) -> Bytes:
    """Builds the record of an expert from its matrices [rows, cols], in the geometry's order."""
    quantized = [quantize_matrix(w, spec) for w, spec in zip(weights, geometry.matrices, strict=True)]
    return assemble(geometry, layout, quantized)
