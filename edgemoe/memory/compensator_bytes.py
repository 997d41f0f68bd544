"""The bytes of a limit that compensators take: all of them where they fit, else a budget, and the rest is streamed."""

from __future__ import annotations

from dataclasses import dataclass

from edgemoe.errors import DoesNotFit
from edgemoe.kernels.base import DEVICE_BATCH_ROWS, MOST_ROWS
from edgemoe.kernels.device_compensators import decoded_bytes_of
from edgemoe.kernels.scratch import compensator_bytes
from edgemoe.memory.overhead import EXPERT_BYTES
from edgemoe.storage.base import BLOCK
from edgemoe.storage.compensators.geometry import CompensatorGeometry, Ranks
from edgemoe.storage.compensators.index import CompensatorIndex
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.sizes import format_least, format_size

READ_BYTES = 200_000
"""Bytes that a disk reads in a read's fixed time, which does not depend on its size: small reads gain more per byte."""

FEWEST = 2
"""Fewest of the largest compensators that a budget holds: one is used while another arrives."""


@dataclass(frozen=True)
class CompensatorBytes:
    """Bytes of a model's compensators, and how much they are used.

    >>> some = CompensatorBytes(experts=10, total=40_000_000, largest=4_000_000, fixed=500, use=0.25)
    >>> some.minimum, some.budget(900_000_000, 1_000_000_000), some.budget(2_000_000_000, 1_000_000_000)
    (8000000, 9333333, 40000000)

    Args:
        experts: number of the model's experts.
        total: bytes of all compensators.
        largest: bytes of the largest compensator.
        fixed: bytes that the interpreter and C need for each compensator, and bytes of V x for the rows of a call.
        use: fraction of a token's experts that are compensated, at most 1.
        limit: most bytes of compensators in memory; None: `budget` decides.
    """

    experts: int
    total: int
    largest: int
    fixed: int
    use: float
    limit: int | None = None

    @property
    def minimum(self) -> int:
        """Fewest bytes of compensators in memory."""
        return min(self.total, FEWEST * self.largest)

    @property
    def least(self) -> int:
        """Fewest bytes of compensators in memory: with a limit the bytes that it gives."""
        return self.minimum if self.limit is None else min(self.limit, self.total)

    @property
    def most(self) -> int:
        """Most bytes of compensators in memory."""
        return self.total if self.limit is None else self.least

    def budget(self, free: int, planes: int) -> int:
        """Divides free bytes between compensators and planes.

        Where not all of both fit, compensators get a part of the bytes: the cost of reading all of them, weighted by
        how often one is used, relative to the cost of reading all planes.

        Args:
            free: bytes for both.
            planes: bytes of all experts.
        """
        if self.limit is not None:
            return self.least
        reads = self.experts * READ_BYTES
        own, others = self.use * (self.total + reads), planes + reads
        part = max(int(free * own / (own + others)), free - planes)
        return max(self.minimum, min(self.total, part))

    def with_(self, other: CompensatorBytes) -> CompensatorBytes:
        """The bytes that are enough for either, one after the other."""
        if not (self.total and other.total):
            return self if self.total else other
        names = ("experts", "total", "largest", "fixed", "use")
        return CompensatorBytes(*(max(getattr(self, name), getattr(other, name)) for name in names))

    @classmethod
    def of(cls, index: CompensatorIndex, use: float, limit: int | None = None) -> CompensatorBytes:
        """Byte sizes of a store's compensators.

        Raises:
            DoesNotFit: a limit below `minimum`.
        """
        ranks = [entry.ranks for layer in index.layers.values() for entry in layer.entries]
        widest = max(gate + up for gate, up, _ in ranks) + max(down for *_, down in ranks)
        made = cls(len(ranks), index.nbytes, index.largest, _fixed(len(ranks), widest), use, limit)
        if limit is not None and limit < made.minimum:
            least = format_least(made.minimum)
            raise DoesNotFit(
                f"--compensators-limit {least} or more (two compensators of {format_size(made.largest)})",
                format_size(limit),
                f"use --compensators-limit {least} or leave it out",
                minimum=made.minimum,
            )
        return made

    @classmethod
    def on_device(cls, index: CompensatorIndex, geometry: RecordGeometry, use: float) -> CompensatorBytes:
        """Byte sizes of a store's compensators in a device's memory, which has all of them."""
        ranks = [entry.ranks for layer in index.layers.values() for entry in layer.entries]
        largest = max(
            sum(a.rows * a.columns for a in _shape(geometry, each).arrays.values()) for each in ranks
        )
        up, down = geometry.matrices
        # A part's rows in float32 and the factors of one expert, twice each; then rows of a call without the kernel's
        # own activation, its inputs and its results.
        fixed = 8 * (MOST_ROWS * (up.rows + down.rows + max(up.cols, down.cols)) + largest)
        fixed += 2 * DEVICE_BATCH_ROWS * (3 * up.rows + 3 * down.rows)
        total = decoded_bytes_of(index, geometry)
        return cls(len(ranks), total, total, fixed, use)

    @classmethod
    def at_most(cls, geometry: RecordGeometry, experts: int, mean_rank: int, use: float) -> CompensatorBytes:
        """Byte sizes of compensators of a mean rank, however their ranks are assigned."""
        mean = CompensatorGeometry.of(geometry, (mean_rank,) * 3)
        largest = CompensatorGeometry.of(geometry, (mean.most,) * 3).nbytes
        total = experts * (mean.nbytes + 2 * BLOCK)
        return cls(experts, total, largest, _fixed(experts, 3 * mean.most), use)


NO_COMPENSATORS = CompensatorBytes(0, 0, 0, 0, 0)


def _shape(geometry: RecordGeometry, ranks: Ranks) -> CompensatorGeometry:
    return CompensatorGeometry.of(geometry, ranks)


def _fixed(experts: int, widest: int) -> int:
    return experts * EXPERT_BYTES + compensator_bytes(experts, widest)
