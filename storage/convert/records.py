"""The records of a checkpoint's experts, made one after another on any thread."""

from __future__ import annotations

from collections import deque

from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.convert.source_error import SourceError
from edgemoe.storage.convert.source_table import SourceTable
from edgemoe.storage.record.encode import assemble, coding, quantize_matrix, squared_error
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.record.planes import Bytes


class ExpertRecords:
    """Makes the records of a store. Thread-safe.

    Args:
        experts: the checkpoint's experts.
        geometry: the geometry of the store.
        layout: the order of codes in the records.
        max_level: the conversion's highest level; None: what the source justifies.

    Attributes:
        table: a row for each type of the source; its errors are added as experts are compared.
    """

    def __init__(
        self, experts: ExpertWeights, geometry: RecordGeometry, layout: Layout, max_level: int | None
    ) -> None:
        self._experts, self._geometry, self._layout = experts, geometry, layout
        self.table = SourceTable(experts.sources, geometry, max_level)

    def make(self, layer: int, expert: int) -> tuple[Bytes, SourceError]:
        """Makes the record of an expert, and compares the first and the middle one of each layer with the source.

        Raises:
            DamagedData, ModelRefused: from ExpertWeights.read.
        """
        weights, quantized = deque(self._experts.read(layer, expert)), []
        error, geometry = SourceError(), self._geometry.of_layer(layer)
        for index, spec in enumerate(geometry.matrices):
            weight = weights.popleft()  # freed before the next is quantized: some experts have gigabytes
            made = quantize_matrix(weight, spec, *coding(geometry, index, weight))
            if expert in (0, self._experts.count // 2):
                found = SourceError(*squared_error(weight, made, spec, geometry.max_level))
                self.table.add(layer, index, found)
                error.add(found)
            quantized.append(made)
        del weight
        return assemble(geometry, self._layout, quantized), error
