"""The contract of a kernel: one expert applied to its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from storage.base import Blocks

Activation = Callable[[torch.Tensor], torch.Tensor]
"""[T, 2 I] gate and up -> [T, I]: the model's own gating."""


class ExpertKernel(Protocol):
    """Runs experts of one geometry on one device. Not thread-safe."""

    def forward(
        self, x: torch.Tensor, blocks: Blocks, held: int, level: int, gate: Activation
    ) -> torch.Tensor:
        """One expert applied to its tokens.

        Args:
            x: bf16 [T, H], T > 0.
            blocks: the expert's resident blocks.
            held: the level the blocks make.
            level: the level to compute at, at most held.
            gate: the model's gating between the two products.

        Returns:
            bf16 [T, H].
        """
