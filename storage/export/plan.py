"""The plan of an export: files of regions, and the pieces of work that fill them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from edgemoe.storage.export.levels import Levels
from edgemoe.storage.export.matrices import Affine, StoreExperts

SHARD_BYTES = 2_000_000_000
"""Bytes after which the next layer begins a new file. A killed export repeats at most one file."""


@dataclass
class Errors:
    """Sums of squares over the experts that an export compares with the store's highest level.

    Attributes:
        exported: sum of squares of the exported weights' errors.
        own: sum of squares of the errors that the store's own weights have at the exported level.
        total: sum of squares of the weights.
        kept: groups whose codes and scale are the store's own.
        groups: all groups.
    """

    exported: float = 0.0
    own: float = 0.0
    total: float = 0.0
    kept: int = 0
    groups: int = 0

    def add(self, other: Errors) -> None:
        """Adds other sums."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Made:
    """The result of one piece of work.

    Args:
        parts: (region of the file, contiguous bytes), in the order in which they are appended.
        errors: the errors of its weights.
    """

    parts: list[tuple[int, memoryview]]
    errors: Errors = field(default_factory=Errors)


@dataclass(frozen=True)
class Work:
    """A piece of work.

    Args:
        nbytes: bytes that the work and its result take, together with its input.
        run: does it, in any thread.
    """

    nbytes: int
    run: Callable[[], Made]


@dataclass
class Unit:
    """Tensors that stay together in a file: one layer's experts, or all tensors outside of experts.

    Args:
        tensors: name -> (element type as the format names it, shape), in the order of the file.
        regions: bytes of every run of the tensors' data that is written in order.
        work: fills the regions; a part's region counts from the unit's first.
    """

    tensors: dict[str, tuple[Any, tuple[int, ...]]] = field(default_factory=dict)
    regions: list[int] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)


@dataclass(frozen=True)
class PlannedFile:
    """One file of weights.

    Args:
        name: the name of the file.
        header: bytes before the tensors' data.
        units: the units that follow, in order.
    """

    name: str
    header: bytes
    units: Sequence[Unit]

    @property
    def regions(self) -> list[int]:
        """Bytes of every region: the header, then the regions of all units."""
        return [len(self.header), *(size for unit in self.units for size in unit.regions)]


class Plan(Protocol):
    """An export in one format: all names, sizes and small files, before any weight is read."""

    @property
    def files(self) -> Sequence[PlannedFile]:
        """Files of weights, in the order of writing."""

    @property
    def small_files(self) -> dict[str, bytes]:
        """Other files, such as config.json, which are written after all weights."""

    @property
    def copied(self) -> Sequence[str]:
        """Names of the store's files that are copied as they are."""


def shards(units: Sequence[Unit], limit: int = SHARD_BYTES) -> list[list[Unit]]:
    """Divides units into files: a new one begins where a file has `limit` bytes or more."""
    out: list[list[Unit]] = []
    size = limit
    for unit in units:
        if size >= limit:
            out.append([])
            size = 0
        out[-1].append(unit)
        size += sum(unit.regions)
    return out


@dataclass(frozen=True)
class Expert:
    """An expert to export.

    Args:
        experts: the store's experts.
        layer, number: the expert's place.
        level: the level that is exported.
        compared: whether its errors are measured.
    """

    experts: StoreExperts
    layer: int
    number: int
    level: int
    compared: bool

    def read(self, level: int | None = None) -> tuple[Affine, Affine, Affine]:
        """Reads gate, up and down at `level`, by default at the expert's own; at the store's highest if compared.

        The codes lie in arrays that the thread's next call overwrites.
        """
        if self.compared:
            level = self.experts.geometry.max_level
        elif level is None:
            level = self.level
        return self.experts.read(self.layer, self.number, level)

    def errors(self, stored: Affine, exported: torch.Tensor, kept: int = 0, groups: int = 0) -> Errors:
        """Compares exported weights with the store's; only where `compared`.

        Args:
            stored: rows of a matrix of `read`, at the store's highest level.
            exported: their exported weights, floating point.
            kept, groups: see Errors.
        """
        source, own = stored.weights(), stored.at(self.level).weights()
        return Errors(
            _squares(exported.float() - source), _squares(own - source), _squares(source), kept, groups
        )


def _squares(values: torch.Tensor) -> float:
    return float(values.square().sum(dtype=torch.float64))


def add_experts(
    unit: Unit, experts: StoreExperts, levels: Levels, layer: int, size: int, make: Callable[[Expert], Made]
) -> None:
    """Adds the work of a layer's experts to a unit; the first and the middle one are compared, as in a conversion.

    Args:
        unit: the unit to which the work is added.
        experts: the store's experts.
        levels: bits of each expert.
        layer: the layer that the experts belong to.
        size: bytes that an expert has in the export.
        make: encodes an expert.
    """
    count = experts.count(layer)
    for number in range(count):
        expert = Expert(experts, layer, number, levels[layer][number], number in (0, count // 2))
        # Some formats lay the encoded matrices out again.
        unit.work.append(Work(2 * size, partial(make, expert)))


def raw(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in the order of its elements; shares its memory where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
