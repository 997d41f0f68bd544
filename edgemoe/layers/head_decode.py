"""Runs a model's head for further tokens by the compiled kernel: tokens of one or more sequences in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgemoe.experts.step import StepContext
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
        joined: torch.Tensor = self._model.joined(self._native.embed(tokens)[0], states)
        logits = self._decoded(joined[None].contiguous(), step)
        normed = self._native.buffers.rows_of(NORMED, len(tokens), states.shape[-1])
        return logits, normed[0].clone()
