"""The state of linear-attention layers: its size is fixed, and each token changes it, so it cannot be cropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from edgemoe.kv.shape import LinearState


class LinearStates:
    """The states of one sequence's linear-attention layers, in two copies.

    A step reads the valid copy and writes the other one, so a step that fails does not change the sequence.

    Args:
        shape: the shape of the states.
        place: the device.
    """

    def __init__(self, shape: LinearState, place: torch.device | str = "cpu") -> None:
        layers = len(shape.layers)
        self._slots = {layer: slot for slot, layer in enumerate(shape.layers)}
        conv = 2, layers, 1, shape.channels, shape.kernel
        recurrent = 2, layers, 1, shape.heads, shape.key_dim, shape.value_dim
        self._conv = torch.zeros(conv, dtype=torch.bfloat16, device=place)
        self._recurrent = torch.zeros(recurrent, device=place)
        self.valid = 0
        """The copy that a step reads."""

    def of(self, layer: int, *, fresh: bool, continued: bool = False) -> LayerState:
        """Returns a layer's state for the current step, or for a block of its rows.

        Args:
            layer: number of the layer in the model.
            fresh: the sequence has no token before these rows.
            continued: they are not the step's first ones.
        """
        slot, new = self._slots[layer], 1 - self.valid
        old = new if continued else self.valid
        conv, recurrent = self._conv[:, slot], self._recurrent[:, slot]
        return LayerState((conv[old], conv[new]), (recurrent[old], recurrent[new]), fresh)

    def has(self, layer: int) -> bool:
        """Whether a layer of the model has a state."""
        return layer in self._slots

    def copies(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both copies of a layer's state.

        Returns:
            bf16 [2, 1, channels, kernel] and float32 [2, 1, heads, key_dim, value_dim].
        """
        slot = self._slots[layer]
        return self._conv[:, slot], self._recurrent[:, slot]

    def copy(self, other: LinearStates) -> None:
        """Takes another sequence's valid states."""
        self._conv[self.valid] = other._conv[other.valid]
        self._recurrent[self.valid] = other._recurrent[other.valid]

    def copy_next(self, other: LinearStates) -> None:
        """Takes the states that a step of another sequence has written, in the copy that a step writes."""
        self._conv[1 - self.valid] = other._conv[1 - other.valid]
        self._recurrent[1 - self.valid] = other._recurrent[1 - other.valid]

    def clear(self) -> None:
        """Zeros the valid states, as for a sequence without tokens."""
        self._conv[self.valid].zero_()
        self._recurrent[self.valid].zero_()

    def commit(self) -> None:
        """Makes the copy that the step wrote the valid one."""
        self.valid = 1 - self.valid


@dataclass(frozen=True)
class LayerState:
    """One layer's state of one sequence, with the cache interface of transformers' linear-attention modules.

    Args:
        conv: bf16 [1, channels, kernel], the last inputs of the convolution, as (before the step, after it).
        recurrent: float32 [1, heads, key_dim, value_dim], as (before the step, after it).
        fresh: whether the sequence has no token before the step.
    """

    conv: tuple[torch.Tensor, torch.Tensor]
    recurrent: tuple[torch.Tensor, torch.Tensor]
    fresh: bool

    @property
    def in_place(self) -> bool:
        """Whether the state after the step lies where the one before it lies: in blocks of rows after the first."""
        return self.conv[0].data_ptr() == self.conv[1].data_ptr()

    @property
    def before(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The state before the step, [channels, kernel] and [heads, key_dim, value_dim]; None: there is no token."""
        return None if self.fresh else (self.conv[0][0], self.recurrent[0][0])

    @property
    def after(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The place of the state after the step, [channels, kernel] and [heads, key_dim, value_dim]."""
        return self.conv[1][0], self.recurrent[1][0]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Returns the last inputs in the copy after the step, which a module updates in place for a single token."""
        if self.fresh:
            return None
        before, after = self.conv
        return after.copy_(before)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Returns the recurrence before the step, in the copy after it: a kernel may compute in place."""
        if self.fresh:
            return None
        before, after = self.recurrent
        return after if after.data_ptr() == before.data_ptr() else after.copy_(before)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns False: the other copy undoes a step."""
        return False

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> torch.Tensor:
        """Stores the step's inputs [1, channels, R]. Returns the earlier inputs followed by the step's inputs."""
        before, after = self.conv
        earlier = torch.zeros_like(before) if self.fresh else before
        inputs = torch.cat((earlier, conv_states), dim=-1)
        after.copy_(inputs[..., -after.shape[-1] :])
        return inputs

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, **kwargs: Any) -> None:
        """Stores the recurrence after the step."""
        self.recurrent[1].copy_(recurrent_states)

    def recurrent_after(self) -> torch.Tensor:
        """Returns the recurrence after the step, with the one before it in place, to be computed further."""
        kept = self.get_recurrent_state(0)
        return self.recurrent[1].zero_() if kept is None else kept
