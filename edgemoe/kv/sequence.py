"""Keys and values: one preallocated cache per sequence, and the view of them that a step's model pass gets."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

from edgemoe.kv.linear_state import LinearStates
from edgemoe.kv.shape import KVShape
from edgemoe.kv.step import Step, StepState
from storage.errors import ContextExceeded


class SequenceKV:
    """Keys and values of one sequence in every layer, bf16, allocated once for `context` tokens at a `place`.

    `length` tokens are valid. Not thread-safe; a step writes past `length` and moves it only when the
    whole step succeeded, so an error or Ctrl-C in the middle leaves the sequence as it was.

    Attributes:
        keys: [layers, heads, context, key_dim], of the shape's layers in their order (`slots`).
        values: [layers, heads, context, value_dim]; where the shape has latents, a view of their part of the keys.
        slices: (keys, values) of each of them, [heads, context, D].
        states: of linear-attention layers; None: there are none.
    """

    def __init__(self, shape: KVShape, context: int, place: torch.device | str = "cpu") -> None:
        self.shape, self.context, self.length = shape, context, 0
        self.slots = {layer: slot for slot, layer in enumerate(shape.layers)}
        size = len(shape.layers), shape.heads, context
        self.keys = torch.empty(*size, shape.key_dim, dtype=torch.bfloat16, device=place)
        self.values = torch.empty(*size, shape.value_dim, dtype=torch.bfloat16, device=place)
        if shape.latent:
            self.values = self.keys[..., : shape.latent]
        self.slices = list(zip(self.keys.unbind(), self.values.unbind(), strict=True))
        self.states = LinearStates(shape.linear, place) if shape.linear else None

    def require(self, tokens: int) -> None:
        """Raises ContextExceeded, with both counts, if `tokens` more do not fit."""
        if self.length + tokens > self.context:
            raise ContextExceeded(
                f"a sequence of {self.length + tokens} tokens was wanted",
                f"its context holds {self.context}",
                "Use a larger --context or a shorter prompt",
            )

    def crop(self, length: int) -> int:
        """Forgets every token from `length` on, which must not be longer than what is valid.

        Returns:
            how many tokens are left: `length`, or none where a linear layer's state cannot go back to it.
        """
        assert 0 <= length <= self.length
        self.length = 0 if self.states and length < self.length else length
        return self.length

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts keys and values [heads, R, D] behind the valid ones; of latents: the latent, and the rotary key."""
        slot, end = self.slots[layer], self.length + keys.shape[1]
        if self.shape.latent:
            self.keys[slot, :, self.length : end] = torch.cat((keys, values), dim=-1)
        else:
            self.keys[slot, :, self.length : end] = keys
            self.values[slot, :, self.length : end] = values

    def commit(self, tokens: int) -> None:
        """Makes what a step of so many tokens has written valid."""
        self.length += tokens
        if self.states:
            self.states.commit()


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
        """Writes the step's keys and values [1, heads, rows, D] behind each sequence's own; returns them unchanged.

        While a step is noted attention does so: where they go is no part of what is the same for every token.
        """
        if self.state.between is None:
            self.write(layer_idx, key_states, value_states)
        return key_states, value_states

    def write(self, layer_idx: int, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """See update."""
        for sequence, row, rows in self.spans:
            sequence.write(
                layer_idx, key_states[0, :, row : row + rows], value_states[0, :, row : row + rows]
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the first sequence before this step."""
        return self.spans[0][0].length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """0: positions say where rows stand, and no mask over them is ever made."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(query_length, 0), for the same reason."""
        return query_length, 0

    def commit(self) -> None:
        """Makes the step's tokens part of their sequences."""
        for sequence, _, rows in self.spans:
            sequence.commit(rows)
