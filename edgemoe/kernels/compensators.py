"""The compensators of a store, as kernels read them."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from edgemoe.cache.fixed_places import FixedPlaces
from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.cache.policies import make_policy
from edgemoe.kernels.native.structures import Compensator, FactorRows, Factors
from edgemoe.prefetch.compensators.tier import CompensatorTier
from edgemoe.storage.base import Blocks, ExpertKey
from edgemoe.storage.compensators.geometry import GROUP, CompensatorGeometry, FactorArray
from edgemoe.storage.compensators.index import CompensatorIndex
from edgemoe.storage.compensators.opening import of_manifest
from edgemoe.storage.compensators.reader import KIND, LEVEL, CompensatorForm, CompensatorReader
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.record.planes import Bytes
from edgemoe.storage.store.manifest import Manifest


@dataclass(frozen=True, slots=True)
class ExpertCompensator:
    """One expert's compensator.

    Args:
        raw: uint8 [bytes], of storage.compensators.index.
        geometry: the geometry of its arrays.
        bits: bits per weight that it adds to the expert's.
        address: the address of the C structure, valid as long as its Compensators are open.
    """

    raw: Bytes
    geometry: CompensatorGeometry
    bits: float
    address: int


class Compensators:
    """The compensators of a store, of which some or all are in RAM. `close` it when no kernel reads them any more.

    Each has one address for as long as this is open, so the tables are made once; what is in RAM is in `tier`.

    Args:
        directory: the directory of the store, or another that has the files of the index.
        index: the index of the compensators.
        geometry: the geometry of the store's records.
        budget: most bytes of them in RAM, at least `index.largest`; None: all.
        policy: name of the eviction policy.

    Raises:
        DamagedData, ReadFailed: as CompensatorReader.

    Attributes:
        level: the base level: experts computed at it can be compensated.
        where: the tier that they are in, and what reads them.
    """

    def __init__(
        self,
        directory: Path,
        index: CompensatorIndex,
        geometry: RecordGeometry,
        *,
        budget: int | None = None,
        policy: str = "lfru",
    ) -> None:
        self.level = index.base_level
        sizes = {
            ExpertKey(layer, expert): entry.length
            for layer, found in index.layers.items()
            for expert, entry in enumerate(found.entries)
            if entry.length
        }
        budget, make = index.nbytes if budget is None else budget, partial(make_policy, policy)
        with ExitStack() as opened:
            reader = opened.enter_context(CompensatorReader(directory, index))
            places, form = FixedPlaces(KIND, sizes, budget), CompensatorForm(index)
            tier = PlaneTier(form, {}, make, device="cpu", name="compensators", places=places)
            opened.callback(_close, tier)
            self.where = CompensatorTier(tier, form, reader)
            self._experts, self._tables = _described(index, geometry, places)
            tier.observe(self._changed)
            self._opened = opened.pop_all()

    @classmethod
    def of_store(
        cls, directory: Path, manifest: Manifest, *, budget: int | None = None, policy: str = "lfru"
    ) -> Compensators:
        """Opens the compensators of a store that has some, and reads as many as the budget holds.

        Raises:
            StoreBusy: others have replaced them since the manifest was read.
            DamagedData, ReadFailed: as CompensatorReader.
        """
        assert manifest.compensators
        with of_manifest(directory, manifest):
            made = cls(directory, manifest.compensators, manifest.geometry, budget=budget, policy=policy)
        return made.filled()

    def filled(self) -> Compensators:
        """Reads compensators, equally many of every layer, until no other one fits; returns this.

        Raises:
            DamagedData, ReadFailed: as CompensatorReader; everything is closed then.
        """
        tier, form, reader = self.where
        try:
            for key in sorted(self._experts, key=lambda key: (key.expert, key.layer)):
                into = tier.reserve(key, LEVEL, evict=False)
                if into is None:
                    break
                try:
                    form.fill(reader, key, LEVEL, into.into, None)
                except BaseException:
                    tier.abandon(into)
                    raise
                tier.release(tier.publish(into))
        except BaseException:
            self.close()
            raise
        return self

    def of(self, key: ExpertKey) -> ExpertCompensator | None:
        """An expert's compensator, in RAM while the tier has it; None where all its ranks are 0."""
        return self._experts.get(key)

    def bits_of(self, layer: int, expert: int) -> float:
        """Bits a weight that an expert's compensator adds; 0 where it has none."""
        found = self._experts.get(ExpertKey(layer, expert))
        return found.bits if found else 0.0

    def table(self, layer: int) -> int | None:
        """The address of a layer's C structures, one per expert; None for a layer without experts."""
        table = self._tables.get(layer)
        return None if table is None else ctypes.addressof(table)

    def close(self) -> None:
        """Closes the files and frees the memory. Idempotent. No read may be under way."""
        self._experts.clear()
        self._tables.clear()
        self._opened.close()

    def _changed(self, key: ExpertKey, level: int, blocks: Blocks) -> None:
        if table := self._tables.get(key.layer):
            table[key.expert].absent = not level


def _close(tier: PlaneTier) -> None:
    with suppress(
        BufferError, ValueError
    ):  # a frame of an interrupted step refers to it: it is freed with that
        tier.close()


def _described(
    index: CompensatorIndex, geometry: RecordGeometry, places: FixedPlaces
) -> tuple[dict[ExpertKey, ExpertCompensator], dict[int, ctypes.Array[Compensator]]]:
    """Every expert's compensator, and of each layer the C structures, all of them absent."""
    experts: dict[ExpertKey, ExpertCompensator] = {}
    tables: dict[int, ctypes.Array[Compensator]] = {}
    for layer, found in index.layers.items():
        table = tables[layer] = (Compensator * len(found.entries))()
        for expert, entry in enumerate(found.entries):
            if not entry.length:
                continue
            key = ExpertKey(layer, expert)
            shape, raw = (
                CompensatorGeometry.of(geometry, entry.ranks),
                np.frombuffer(places.view(key), np.uint8),
            )
            table[expert] = structure(raw, shape)
            table[expert].absent = 1
            address = ctypes.addressof(table) + expert * ctypes.sizeof(Compensator)
            experts[key] = ExpertCompensator(raw, shape, 8 * shape.used / geometry.weights, address)
    return experts, tables


def structure(raw: Bytes, geometry: CompensatorGeometry) -> Compensator:
    """The C structure of a compensator, valid for as long as its bytes stay where they are.

    Args:
        raw: uint8 [geometry.nbytes].
        geometry: the geometry of its arrays.
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
