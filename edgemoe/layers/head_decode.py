"""Runs a model's head for further tokens by the compiled kernel: tokens of one or more sequences in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from edgemoe.experts.runtime import ExpertRuntime
from edgemoe.experts.step import StepContext
from edgemoe.families.base import FusedGQA
from edgemoe.kernels.native.experts import NativeExpertKernel
from edgemoe.kernels.program import NORMED
from edgemoe.layers.fused_decode import FusedDecode


class HeadDecode(FusedDecode):
    """Runs steps of consecutive tokens of some sequences through a head. Used by one thread at a time.

    Args:
        model: the head, from layers.head.build_head.
        traits: the traits of the model's family.
        runtime: the state that the model's MoE layers share.
        kernel: the runtime's kernel, or the kernel that it wraps.
        rows: most tokens of a step.
        first: number of the head's layer. It follows the numbers of the model's layers.
    """

    def __init__(
        self,
        model: Any,
        traits: FusedGQA,
        runtime: ExpertRuntime,
        kernel: NativeExpertKernel,
        rows: int,
        first: int = 0,
    ) -> None:
        super().__init__(model, traits, runtime, kernel, rows, first)
        self._head, self._given = model, torch.empty(0)

    def run(
        self, tokens: Sequence[int], states: torch.Tensor, step: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends rows to the step's sequences, which are committed by the caller.

        Args:
            tokens: token ids, at most `most_rows`.
            states: bf16 [rows, H], for each token the normed state after the token before it.
            step: a step of these tokens.

        Returns:
            float32 [rows, vocab], the logits of the token after each one; and bf16 [rows, H], the states after the
            head's norm, of which the next guesses are made.
        """
        self._given = states
        logits = self(tokens, step)
        normed = self._native.buffers.rows_of(NORMED, len(tokens), states.shape[-1])
        return logits, normed[0].clone()

    def _embedded(self, tokens: Sequence[int], step: StepContext) -> torch.Tensor:
        """The layer's input, bf16 [1, rows, H], of the tokens and the states before them."""
        embedded = super()._embedded(tokens, step)
        joined: torch.Tensor = self._head.joined(embedded[0], self._given)
        return joined[None].contiguous()
