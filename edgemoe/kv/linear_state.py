"""The state of linear-attention layers: of fixed size, and changed by every token, so that it cannot be cropped."""

from __future__ import annotations

from typing import Any

import torch

from edgemoe.kv.shape import LinearState


class LinearStates:
    """States of one sequence's linear layers, in two copies: a step reads the valid one and writes the other.

    So a step that fails leaves the sequence as it was, and `commit` costs nothing.
    """

    def __init__(self, shape: LinearState, place: torch.device | str = "cpu") -> None:
        layers = len(shape.layers)
        self._slots = {layer: slot for slot, layer in enumerate(shape.layers)}
        self._conv = torch.zeros(
            2, layers, 1, shape.channels, shape.kernel, dtype=torch.bfloat16, device=place
        )
        size = 2, layers, 1, shape.heads, shape.key_dim, shape.value_dim
        self._recurrent = torch.zeros(size, device=place)
        self._valid = 0

    def of(self, layer: int, *, fresh: bool) -> LayerState:
        """One layer's state for the step that is running; `fresh` where no token came before it."""
        slot, old = self._slots[layer], self._valid
        conv, recurrent = self._conv[:, slot], self._recurrent[:, slot]
        return LayerState((conv[old], conv[1 - old]), (recurrent[old], recurrent[1 - old]), fresh=fresh)

    def commit(self) -> None:
        """Makes what the step has written the valid copy."""
        self._valid = 1 - self._valid


class LayerState:
    """What a linear-attention module of transformers asks of its cache, for one layer and sequence.

    Args:
        conv: bf16 [1, channels, kernel], the last inputs of the convolution: before the step, after it.
        recurrent: float32 [1, heads, key_dim, value_dim]: before the step, after it.
        fresh: nothing came before.
    """

    def __init__(
        self,
        conv: tuple[torch.Tensor, torch.Tensor],
        recurrent: tuple[torch.Tensor, torch.Tensor],
        *,
        fresh: bool,
    ) -> None:
        self._conv, self._recurrent, self._fresh = conv, recurrent, fresh

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs, as the copy after the step, which a single token's module updates in place."""
        if self._fresh:
            return None
        before, after = self._conv
        return after.copy_(before)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The recurrence before the step."""
        return None if self._fresh else self._recurrent[0]

    def is_recording_past(self, layer_idx: int) -> bool:
        """Never: a step is undone by its other copy."""
        return False

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> torch.Tensor:
        """Takes the step's inputs [1, channels, R]; returns them behind those that were kept."""
        before, after = self._conv
        kept = torch.zeros_like(before) if self._fresh else before
        inputs = torch.cat((kept, conv_states), dim=-1)
        after.copy_(inputs[..., -after.shape[-1] :])
        return inputs

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> None:
        """Takes the recurrence after the step."""
        self._recurrent[1].copy_(recurrent_states)
