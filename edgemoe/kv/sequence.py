"""Keys and values of one sequence, preallocated for its context."""

from __future__ import annotations

import torch

from edgemoe.kv.linear_state import LinearStates
from edgemoe.kv.shape import KVShape
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
                f"a context of at least {self.length + tokens} tokens",
                f"one of {self.context}",
                "use a larger --context or a shorter prompt",
            )

    def crop(self, length: int) -> int:
        """Forgets every token from `length` on; at most the valid length.

        Returns:
            the tokens that are left: `length`, or 0 where a linear layer's state cannot go back to it.
        """
        assert 0 <= length <= self.length
        self.length = 0 if self.states and length < self.length else length
        return self.length

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes keys and values [heads, R, D] behind the valid ones; with latents: the latent, and the rotary key."""
        slot, end = self.slots[layer], self.length + keys.shape[1]
        if self.shape.latent:
            self.keys[slot, :, self.length : end] = torch.cat((keys, values), dim=-1)
        else:
            self.keys[slot, :, self.length : end] = keys
            self.values[slot, :, self.length : end] = values

    def commit(self, tokens: int) -> None:
        """Makes the last `tokens` tokens that a step wrote valid."""
        self.length += tokens
        if self.states:
            self.states.commit()
