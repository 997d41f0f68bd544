"""The rows of a table that says how a conversion treats each type of a checkpoint's expert weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from edgemoe.storage.convert.source_bits import Found, SourceMatrix
from edgemoe.storage.convert.source_error import SourceError
from edgemoe.storage.record.offsets import RecordGeometry


@dataclass(frozen=True)
class SourceRow:
    """One row of the table: a matrix that has the same types and the same codes in some layers.

    Args:
        types: names of the source's types; two where gate and up differ.
        matrix: gate_up or down.
        layers: number of layers.
        source_bits: bits per weight on disk in the source, with groups' parameters.
        store_bits: the same of the store at its highest level.
        code_bits: bits of the store's codes.
        kept: whether the codes are the source's own.
        source_error: expected relative error of the source against what it was made of.
        error: relative error against the source, over the experts that were compared; None: none was.
    """

    types: str
    matrix: str
    layers: int
    source_bits: float
    store_bits: float
    code_bits: int
    kept: bool
    source_error: float
    error: float | None


class SourceTable:
    """Collects errors while a checkpoint is converted. Thread-safe.

    Args:
        sources: every layer of the checkpoint.
        geometry: the geometry of the store.
        max_level: the conversion's highest level; None: what the source justifies.
    """

    def __init__(self, sources: Found, geometry: RecordGeometry, max_level: int | None) -> None:
        self._found, self._geometry, self._max_level = sources, geometry, max_level
        self._errors: Mapping[tuple[int, int], SourceError] = defaultdict(SourceError)
        self._lock = Lock()

    def add(self, layer: int, matrix: int, error: SourceError) -> None:
        """Adds the error of a matrix of one expert."""
        with self._lock:
            self._errors[layer, matrix].add(error)

    def rows(self) -> list[SourceRow]:
        """The rows, gate_up before down; empty where the source is not quantized."""
        if not any(each.quantized for sources in self._found.values() for each in sources):
            return []
        groups: dict[tuple[int, tuple[str, ...], int, bool], list[int]] = defaultdict(list)
        for layer, sources in self._found.items():
            bits = self._geometry.of_layer(layer).matrix_bits
            for index, source in enumerate(sources):
                kept = source.kept_bits(self._max_level) is not None
                groups[index, source.types, bits[index], kept].append(layer)
        return [self._row(*key, layers) for key, layers in sorted(groups.items())]

    def _row(
        self, index: int, types: tuple[str, ...], bits: int, kept: bool, layers: Sequence[int]
    ) -> SourceRow:
        spec, error = self._geometry.matrices[index], SourceError()
        sources: list[SourceMatrix] = [self._found[layer][index] for layer in layers]
        for layer in layers:
            error.add(self._errors[layer, index])
        source_bits = sum(source.bits_per_weight for source in sources) / len(sources)
        return SourceRow(
            " and ".join(types),
            spec.name,
            len(layers),
            source_bits,
            bits + 32 / spec.group,
            bits,
            kept,
            sum(source.error for source in sources) / len(sources),
            error.relative if error.total else None,
        )
