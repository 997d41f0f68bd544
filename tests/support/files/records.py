"""Records in memory, for tests of their readers."""

from __future__ import annotations

import numpy as np
import torch
from record_codec import encode

from edgemoe.storage.base import Blocks, ExpertKey, PlaneReader
from edgemoe.storage.record.forms import MergedForm
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry

KEY = ExpertKey(3, 5)


class MemoryReader(PlaneReader):
    """Reads planes of one record in memory, and records the calls."""

    def __init__(self, record: np.ndarray, geometry: RecordGeometry) -> None:
        self.record, self.geometry, self.reads = record, geometry, []

    def read(self, key, first, last, into):
        self.reads.append((first, last))
        span = self.geometry.span(first, last)
        assert sum(len(buffer) for buffer in into) == span.length
        at = span.offset
        for buffer in into:
            np.frombuffer(buffer, np.uint8)[:] = self.record[at : at + len(buffer)]
            at += len(buffer)
        return span.length


def geometry_of(gate_up: tuple[int, int], down: tuple[int, int], max_level: int = 8) -> RecordGeometry:
    return RecordGeometry((MatrixSpec.of("gate_up", *gate_up), MatrixSpec.of("down", *down)), max_level)


def blocks_for(form: MergedForm, level: int) -> Blocks:
    return {kind.name: memoryview(bytearray(b"\xa5" * kind.size)) for kind in form.kinds_at(level)}


def a_store(shape, stored: Layout, max_level: int = 8):
    geometry = geometry_of(*shape, max_level)
    weights = [
        torch.randn(m.rows, m.cols, generator=torch.Generator().manual_seed(m.rows))
        for m in geometry.matrices
    ]
    return geometry, weights, encode(geometry, stored, weights)
