"""The compensators of a store in a device's memory, all of them, for torch's operators."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from edgemoe.kernels.compensators import Compensators, ExpertCompensator
from edgemoe.machine.device import Device
from edgemoe.machine.out_of_memory import taking
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.compensators.geometry import GROUP, CompensatorGeometry
from edgemoe.storage.compensators.index import CompensatorIndex
from edgemoe.storage.compensators.low_rank import Correction, Quantized, corrections_of, dequantize3, unpack
from edgemoe.storage.compensators.opening import reader_of_store
from edgemoe.storage.record.offsets import RecordGeometry, align
from edgemoe.storage.store.manifest import Manifest

_PART = 64
"""Bytes: codes and scales start at multiples of it."""


def decoded_bytes(geometry: CompensatorGeometry) -> int:
    """Bytes of a compensator in a device's memory: a byte per code, and scales."""
    return sum(_codes(rows, groups) + _scales(rows, groups) for rows, groups in _shapes(geometry).values())


def decoded_bytes_of(index: CompensatorIndex, geometry: RecordGeometry) -> int:
    """Bytes of all compensators of a store in a device's memory."""
    entries = [entry for layer in index.layers.values() for entry in layer.entries]
    return sum(decoded_bytes(CompensatorGeometry.of(geometry, entry.ranks)) for entry in entries)


@dataclass(frozen=True, slots=True)
class DeviceCompensator(ExpertCompensator):
    """One expert's compensator in a device's memory. `raw` is empty, and `address` 0.

    Args:
        arrays: (matrix, "v" or "u") -> codes int8 [rank, groups, 64] and scales bf16 [rank, groups].
    """

    arrays: Mapping[tuple[str, str], Quantized]

    def corrections(self) -> dict[str, Correction]:
        """The corrections of `gate_up` and `down`, float32 on the device."""
        shapes = self.geometry.arrays
        factors = {name: dequantize3(*self.arrays[name], shapes[name].columns) for name in shapes}
        return corrections_of(factors, self.geometry)


class DeviceCompensators:
    """The compensators of a store in a device's memory. `close` it when no kernel reads them any more.

    Attributes:
        level: the base level: experts computed at it can be compensated.
        where: None: no tier has them, and no request brings them.
    """

    where = None

    def __init__(self, level: int, experts: Mapping[ExpertKey, DeviceCompensator]) -> None:
        self.level, self._experts = level, dict(experts)

    @classmethod
    def of_store(
        cls, directory: Path, manifest: Manifest, device: Device, least: int = 0
    ) -> DeviceCompensators:
        """Reads the compensators of a store that has some, and copies them.

        Args:
            directory, manifest: the store.
            device: the device.
            least: the smallest sufficient --vram-limit in bytes, for the message.

        Raises:
            StoreBusy, DamagedData, ReadFailed: as Compensators.of_store.
            DoesNotFit: the device has too little memory.
        """
        index, geometry = manifest.compensators, manifest.geometry
        assert index
        with taking(device, "compensators", least):
            memory, at = device.allocate(max(decoded_bytes_of(index, geometry), 1)), 0
        experts: dict[ExpertKey, DeviceCompensator] = {}
        with closing(reader_of_store(directory, manifest)) as reader:
            for layer, its in index.layers.items():
                for expert, entry in enumerate(its.entries):
                    if not entry.length:
                        continue
                    key, shape = ExpertKey(layer, expert), CompensatorGeometry.of(geometry, entry.ranks)
                    raw, size = reader.load(key), decoded_bytes(shape)
                    arrays = {name: unpack(raw, array) for name, array in shape.arrays.items()}
                    there = _copied(arrays, memory[at : at + size])
                    bits = 8 * shape.used / geometry.weights
                    experts[key] = DeviceCompensator(np.empty(0, np.uint8), shape, bits, 0, there)
                    at += size
        return cls(index.base_level, experts)

    def of(self, key: ExpertKey) -> DeviceCompensator | None:
        """An expert's compensator; None where all its ranks are 0."""
        return self._experts.get(key)

    def bits_of(self, layer: int, expert: int) -> float:
        """Bits per weight that an expert's compensator adds; 0 where it has none."""
        own = self._experts.get(ExpertKey(layer, expert))
        return own.bits if own else 0.0

    def close(self) -> None:
        """Frees the memory. Idempotent."""
        self._experts.clear()


AnyCompensators = Compensators | DeviceCompensators
"""The compensators of a store, in RAM or in a device's memory."""


def open_compensators(
    directory: Path,
    manifest: Manifest,
    device: Device | None,
    *,
    budget: int,
    policy: str = "lfru",
    least: int = 0,
) -> AnyCompensators:
    """Reads the compensators of a store that has some.

    Args:
        directory, manifest: the store.
        device: has all of them in its memory; None: RAM has as many as the budget holds.
        budget: most bytes of them in RAM.
        policy: name of the eviction policy of those bytes.
        least: the smallest sufficient --vram-limit in bytes, for the message where a device has too little memory.

    Raises:
        StoreBusy, DamagedData, ReadFailed, DoesNotFit: as either's of_store.
    """
    if device:
        return DeviceCompensators.of_store(directory, manifest, device, least)
    return Compensators.of_store(directory, manifest, budget=budget, policy=policy)


def _copied(
    arrays: Mapping[tuple[str, str], Quantized], into: torch.Tensor
) -> dict[tuple[str, str], Quantized]:
    """Copies arrays into uint8 bytes on the device; returns them there."""
    there: dict[tuple[str, str], Quantized] = {}
    at = 0
    for name, (codes, scales) in arrays.items():
        placed = []
        for tensor in (codes, scales):
            target = into[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            target.copy_(tensor)
            placed.append(target)
            at += align(tensor.nbytes, _PART)
        there[name] = placed[0], placed[1]
    return there


def _shapes(geometry: CompensatorGeometry) -> dict[tuple[str, str], tuple[int, int]]:
    """Rows, and groups of a row, of each array."""
    return {name: (array.rows, array.groups) for name, array in geometry.arrays.items()}


def _codes(rows: int, groups: int) -> int:
    return align(rows * groups * GROUP, _PART)


def _scales(rows: int, groups: int) -> int:
    return align(2 * rows * groups, _PART)
