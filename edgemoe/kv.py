"""Keys and values: one preallocated cache per sequence, and the view of them that a step's model pass gets."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from edgemoe.step import Step, StepState
from storage.errors import ContextExceeded


class SequenceKV:
    """Keys and values of one sequence in every layer, bf16, allocated once for `context` tokens.

    `length` tokens are valid. Not thread-safe; a step writes past `length` and moves it only when the
    whole step succeeded, so an error or Ctrl-C in the middle leaves the sequence as it was.
    """

    def __init__(self, layers: int, heads: int, head_dim: int, context: int) -> None:
        self.context, self.length = context, 0
        self.keys = torch.empty(layers, heads, context, head_dim, dtype=torch.bfloat16)
        self.values = torch.empty_like(self.keys)

    @staticmethod
    def bytes_for(layers: int, heads: int, head_dim: int, context: int) -> int:
        """Bytes that a cache of this shape allocates."""
        return 2 * layers * heads * head_dim * context * 2

    def require(self, tokens: int) -> None:
        """Raises ContextExceeded, with both counts, if `tokens` more do not fit."""
        if self.length + tokens > self.context:
            raise ContextExceeded(
                f"a sequence of {self.length + tokens} tokens was wanted",
                f"its context holds {self.context}",
                "Use a larger --context or a shorter prompt",
            )

    def crop(self, length: int) -> None:
        """Forgets every token from `length` on. Must not be longer than what is valid."""
        assert 0 <= length <= self.length
        self.length = length


class StepKV(Cache):  # type: ignore[misc]  # transformers ships no types
    """transformers' cache interface over the sequences of one step. Lives for that step.

    Args:
        step: whose sequences these are.
        state: what attention leaves for the experts.
    """

    def __init__(self, step: Step, state: StepState) -> None:
        super().__init__(layers=[])
        self.state = state
        self.spans: list[tuple[SequenceKV, int, int]] = []
        """(sequence, its first row in the step, rows)."""
        row = 0
        for sequence, tokens in ((s.sequence, s.tokens) for s in step.segments):
            sequence.require(len(tokens))
            self.spans.append((sequence, row, len(tokens)))
            row += len(tokens)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the step's keys and values [1, heads, rows, D] behind each sequence's own; returns them unchanged."""
        for sequence, row, rows in self.spans:
            start, end = sequence.length, sequence.length + rows
            sequence.keys[layer_idx, :, start:end] = key_states[0, :, row : row + rows]
            sequence.values[layer_idx, :, start:end] = value_states[0, :, row : row + rows]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the first sequence before this step."""
        return self.spans[0][0].length

    def commit(self) -> None:
        """Makes the step's tokens part of their sequences."""
        for sequence, _, rows in self.spans:
            sequence.length += rows
