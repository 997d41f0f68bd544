"""Random experts of a model of any family, as records of a store."""

from __future__ import annotations

from collections.abc import Iterable

from edgemoe.bench.synthetic.workload import ExpertPool
from edgemoe.families.base import Family
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.record.planes import Bytes


class Experts:
    """The records of all experts.

    Args:
        family: the model's family.
        max_level: the highest level, 8 or 4.
        layout: the layout of the records.
        distinct: number of layers with experts of their own, which stay in memory and which the other layers repeat;
            None: every layer has its own.

    Attributes:
        geometry: the geometry of a record.
    """

    def __init__(self, family: Family, max_level: int, layout: Layout, distinct: int | None) -> None:
        hidden, inner = family.hidden, family.intermediate
        first = ("gate_up", 2 * inner) if family.gated else ("up", inner)
        matrices = MatrixSpec.of(*first, hidden), MatrixSpec.of("down", hidden, inner)
        self.geometry = RecordGeometry(matrices, max_level)
        self._pool, self._distinct = ExpertPool(self.geometry, 0, layout), distinct
        self._drawn: dict[int, list[Bytes]] = {}

    def records(self, layer: int, count: int) -> Iterable[Bytes]:
        """Returns the records of a layer's experts, in order."""
        if self._distinct is None:
            return self._pool.records(layer, count)
        number = layer % self._distinct
        if number not in self._drawn:
            self._drawn[number] = list(self._pool.records(number, count))
        return self._drawn[number]
