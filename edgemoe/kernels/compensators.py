"""The compensators of a store in RAM, as kernels read them."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgemoe.kernels.native.structures import MOST_ROWS, Compensator, FactorRows, Factors
from storage.base import BLOCK, ExpertKey
from storage.compensator_index import GROUP, CompensatorGeometry, CompensatorIndex, FactorArray
from storage.compensators import CompensatorReader
from storage.errors import MissingTensor, StoreBusy
from storage.manifest import Manifest
from storage.planes import Bytes
from storage.record import RecordGeometry

EXPERT_BYTES = 1024
"""Most bytes that the interpreter takes for one compensator."""


@dataclass(frozen=True, slots=True)
class ExpertCompensator:
    """One expert's compensator in RAM.

    Args:
        raw: uint8 [bytes], of storage.compensator_index.
        geometry: of its arrays.
        bits: that it adds to the expert's bits a weight.
        address: of the C structure, valid as long as the ResidentCompensators.
    """

    raw: Bytes
    geometry: CompensatorGeometry
    bits: float
    address: int


class ResidentCompensators:
    """All compensators of a store. `close` it when no kernel reads them any more.

    Args:
        directory: of the store, or another that has the files of the index.
        index: of them.
        geometry: of the store's records.

    Raises:
        DamagedData, ReadFailed: as CompensatorReader.

    Attributes:
        level: the base level: experts computed at it can be compensated.
    """

    def __init__(self, directory: Path, index: CompensatorIndex, geometry: RecordGeometry) -> None:
        self.level = index.base_level
        self._memory = mmap.mmap(
            -1, max(index.nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self._experts: dict[ExpertKey, ExpertCompensator] = {}
        self._tables: dict[int, ctypes.Array[Compensator]] = {}
        try:
            with CompensatorReader(directory, index) as reader:
                self._load(reader, index, geometry)
        except BaseException:
            self.close()
            raise

    @classmethod
    def of_store(cls, directory: Path, manifest: Manifest) -> ResidentCompensators:
        """Reads those of a store that has some.

        Raises:
            StoreBusy: others have replaced them since the manifest was read.
            DamagedData, ReadFailed: as CompensatorReader.
        """
        assert manifest.compensators
        try:
            return cls(directory, manifest.compensators, manifest.geometry)
        except MissingTensor as error:
            if Manifest.load(directory).compensators == manifest.compensators:
                raise
            raise StoreBusy(
                f"the compensators that {directory} had a moment ago",
                "others, which `edgemoe compensate` has just written",
                "run the command again",
            ) from error

    def _load(self, reader: CompensatorReader, index: CompensatorIndex, geometry: RecordGeometry) -> None:
        at, whole = 0, np.frombuffer(self._memory, np.uint8)
        for layer, found in index.layers.items():
            table = self._tables[layer] = (Compensator * len(found.entries))()
            for expert, entry in enumerate(found.entries):
                if not entry.length:
                    continue
                key, raw = ExpertKey(layer, expert), whole[at : at + entry.length]
                reader.read(key, raw.data)
                at += entry.length
                shape = CompensatorGeometry.of(geometry, entry.ranks)
                table[expert] = structure(raw, shape)
                bits = 8 * shape.used / geometry.weights
                address = ctypes.addressof(table) + expert * ctypes.sizeof(Compensator)
                self._experts[key] = ExpertCompensator(raw, shape, bits, address)

    def of(self, key: ExpertKey) -> ExpertCompensator | None:
        """An expert's compensator; None where all its ranks are 0."""
        return self._experts.get(key)

    def bits_of(self, layer: int, expert: int) -> float:
        """Bits a weight that an expert's compensator adds; 0 where it has none."""
        found = self._experts.get(ExpertKey(layer, expert))
        return found.bits if found else 0.0

    def table(self, layer: int) -> int | None:
        """The address of a layer's C structures, one an expert; None for a layer without experts."""
        table = self._tables.get(layer)
        return None if table is None else ctypes.addressof(table)

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        self._experts.clear()
        self._tables.clear()
        if not self._memory.closed:
            with suppress(BufferError):  # a frame of an interrupted step refers to it: it is freed with that
                self._memory.close()


def structure(raw: Bytes, geometry: CompensatorGeometry) -> Compensator:
    """The C structure of a compensator, valid for as long as its bytes stay where they are.

    Args:
        raw: uint8 [geometry.nbytes].
        geometry: of its arrays.
    """
    gate, up, down = geometry.ranks
    blocks = (("gate_up", 0, gate), ("gate_up", gate, up), ("down", 0, down))
    made = Compensator()
    for i, (matrix, row, rank) in enumerate(blocks):
        v, u = geometry.arrays[matrix, "v"], geometry.arrays[matrix, "u"]
        made.of[i] = Factors(
            v=_rows(raw, v, row), u=_rows(raw, u, row), rank=rank, rows=u.columns, cols=v.columns
        )
    return made


def _rows(raw: Bytes, array: FactorArray, row: int) -> FactorRows:
    """The rows of an array from one on; null pointers where it has none."""
    if row >= array.rows:
        return FactorRows()
    start, groups = raw.ctypes.data, row * array.groups
    return FactorRows(
        codes=start + array.codes.offset + 3 * GROUP // 8 * groups,
        scales=start + array.scales.offset + 2 * groups,
    )


def most_bytes(geometry: RecordGeometry, experts: int, mean_rank: int) -> int:
    """The most RAM that compensators of a mean rank take, however their ranks are assigned; 0 for a mean of 0."""
    if not mean_rank:
        return 0
    shape = CompensatorGeometry.of(geometry, (mean_rank,) * 3)
    padding = 2 * BLOCK + ctypes.sizeof(Compensator) + EXPERT_BYTES
    return experts * (shape.nbytes + padding) + MOST_ROWS * 4 * 3 * shape.most


def resident_bytes(index: CompensatorIndex) -> int:
    """RAM that compensators take: their bytes, what the interpreter and C have for each, and V x of a call's rows."""
    ranks = [entry.ranks for layer in index.layers.values() for entry in layer.entries]
    widest = max(gate + up for gate, up, _ in ranks) + max(down for *_, down in ranks)
    return index.nbytes + len(ranks) * (ctypes.sizeof(Compensator) + EXPERT_BYTES) + MOST_ROWS * 4 * widest
