"""The contract of an expert kernel: experts applied to their rows, several in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from edgemoe.kernels.activation import Activation
from edgemoe.kernels.compensators import ExpertCompensator
from edgemoe.storage.base import Blocks

BATCH_ROWS = 256
"""Most rows of several experts in one call of a CPU kernel: with more a call's overhead is negligible."""

DEVICE_BATCH_ROWS = 4096
"""Most rows of one call of a device's kernel; BATCH_ROWS is the number for a CPU."""

MOST_ROWS = 512
"""Most rows of one expert in a call of a kernel: a longer prompt does not make a call allocate more."""

QUANTIZED_COLUMNS = 32
"""Fewest columns of a quantized row that share a scale: a group's, and at most 64."""


def quantized_row_bytes(columns: int) -> int:
    """Most bytes of a row that a CPU kernel has quantized: its numbers, and a scale and a sum for each chunk."""
    return columns + 8 * columns // QUANTIZED_COLUMNS


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a call that one expert computes.

    >>> Part(blocks={}, resident=8, level=4, rows=3).rows
    3

    Args:
        blocks: the expert's resident blocks. The caller keeps them leased until the call's work is done.
        resident: the level that the blocks make.
        level: the level to compute at, at most `resident`.
        rows: number of rows, 1 or more.
        compensator: is added to the expert's products; it belongs to the level that the expert is computed at.
        compensated: number of rows, from the first, that get the compensator's products; 1 to `rows` with one.
    """

    blocks: Blocks
    resident: int
    level: int
    rows: int
    compensator: ExpertCompensator | None = None
    compensated: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that a call of a kernel takes from a layer's input.

    >>> rows = Rows(torch.arange(6).view(3, 2), torch.tensor([2, 0, 2]))
    >>> rows.gathered(3).tolist()
    [[4, 5], [0, 1], [4, 5]]

    Args:
        x: bf16 [T, H].
        of: int64 [R] in RAM, contiguous, indices into x; None: x has the R rows, or one row that is all of them.
        memo: values that a kernel has made from x, for later calls with rows of the same x.
    """

    x: torch.Tensor
    of: torch.Tensor | None = None
    memo: dict[str, torch.Tensor] = field(default_factory=dict)

    def gathered(self, count: int) -> torch.Tensor:
        """The rows one after another, bf16 [R, H]; one row is expanded.

        Args:
            count: R.
        """
        if self.of is None:
            return self.x.expand(count, -1)
        return self.x.index_select(0, self.of.to(self.x.device, non_blocking=True))


class ExpertKernel(Protocol):
    """Computes experts of one geometry on one device. Not thread-safe: used by the engine's thread."""

    def forward(self, x: Rows, parts: Sequence[Part], activation: Activation, out: torch.Tensor) -> None:
        """Applies experts to their rows. A row's result does not depend on the other rows of the call.

        Args:
            x: the parts' rows one after another.
            parts: their rows add up to R.
            activation: the function between the two products.
            out: bf16 [R, H], contiguous; written.

        Raises:
            MemoryError: no memory for the call's activations.
        """
