"""Records from weights."""

from __future__ import annotations

from collections.abc import Sequence

from storage.encode import assemble, quantize_matrix
from storage.formats.base import Matrix
from storage.layout import Layout
from storage.planes import Bytes
from storage.record import RecordGeometry


def encode(geometry: RecordGeometry, layout: Layout, weights: Sequence[Matrix]) -> Bytes:
    """Builds the record of an expert from its matrices [rows, cols], in the geometry's order."""
    quantized = [quantize_matrix(w, spec) for w, spec in zip(weights, geometry.matrices, strict=True)]
    return assemble(geometry, layout, quantized)
