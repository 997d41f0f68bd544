"""The contract of a kernel: experts applied to their tokens, several in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from storage.base import Blocks

Activation = Callable[[torch.Tensor], torch.Tensor]
"""[R, 2 I] gate and up -> [R, I]: the model's own gating, of all rows of a call at once."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a call that one expert computes.

    Args:
        blocks: the expert's resident blocks.
        held: the level the blocks make.
        level: the level to compute at, at most held.
        rows: how many, 1 or more.
    """

    blocks: Blocks
    held: int
    level: int
    rows: int


class ExpertKernel(Protocol):
    """Runs experts of one geometry on one device. Not thread-safe."""

    def forward(self, x: torch.Tensor, parts: Sequence[Part], gate: Activation) -> torch.Tensor:
        """Experts applied to their rows. A row's result does not depend on what else is in the call.

        Args:
            x: bf16 [R, H], the parts' rows one after another; one row expanded is read once.
            parts: whose rows add up to R.
            gate: the model's gating between the two products.

        Returns:
            bf16 [R, H].
        """


@runtime_checkable
class TokenKernel(ExpertKernel, Protocol):
    """One that can leave a single token's results where they belong."""

    def takes(self, gate: Activation) -> bool:
        """Whether `into` computes experts with this gating between their products, if they have no biases."""

    def prepared(self, blocks: Blocks, level: int) -> object:
        """What `into` wants to know of an expert. Good for as long as its blocks stay where they are."""

    def into(self, x: torch.Tensor, experts: Sequence[object], rows: Sequence[int], y: torch.Tensor) -> None:
        """`forward` of one token, each expert into a row of y.

        Args:
            x: bf16 [1, H], contiguous.
            experts: prepared; of a gating that it takes.
            rows: of y, the experts' own.
            y: bf16 [.., H], contiguous.
        """
