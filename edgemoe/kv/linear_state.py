"""The state of linear-attention layers: its size is fixed, and each token changes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from edgemoe.kv.checkpoints import COUNT, Checkpoints
from edgemoe.kv.shape import LinearState


class LinearStates:
    """The states of one sequence's linear-attention layers, in two copies.

    A step reads the valid copy and writes the other one, so a step that fails does not change the sequence. The state
    after a step has its guesses not. Their rows are kept, and once a guess is accepted the next step begins with its
    row: the recurrence of a right guess is computed twice, its products once, and no state is copied.

    Args:
        shape: the shape of the states.
        place: the device.
        checkpoints: number of states after earlier tokens that there is memory for.

    Attributes:
        valid: the copy that a step reads.
        accepted: the first guesses of the last step that were right; their rows are not in the state yet.
        checkpoints: the states after some earlier tokens.
    """

    def __init__(
        self, shape: LinearState, place: torch.device | str = "cpu", *, checkpoints: int = COUNT
    ) -> None:
        layers = len(shape.layers)
        self._slots = {layer: slot for slot, layer in enumerate(shape.layers)}
        conv = 2, layers, 1, shape.channels, shape.kernel
        recurrent = 2, layers, 1, shape.heads, shape.key_dim, shape.value_dim
        self._conv = torch.zeros(conv, dtype=torch.bfloat16, device=place)
        self._recurrent = torch.zeros(recurrent, device=place)
        self._guesses = torch.empty(
            (2, layers, shape.guesses * shape.row), dtype=torch.bfloat16, device=place
        )
        self.valid = self.accepted = 0
        self.checkpoints = Checkpoints(self._state, checkpoints)

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
        earlier = None if fresh or continued or not self.accepted else self._guesses[old, slot]
        return LayerState(
            (conv[old], conv[new]), (recurrent[old], recurrent[new]), fresh, earlier, self.accepted
        )

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

    def guesses(self, layer: int) -> torch.Tensor:
        """Space for the rows of guesses after both copies of a layer's state: bf16 [2, guesses * row]."""
        return self._guesses[:, self._slots[layer]]

    def copy(self, other: LinearStates) -> None:
        """Takes another sequence's valid states, and its accepted guesses."""
        self._conv[self.valid] = other._conv[other.valid]
        self._recurrent[self.valid] = other._recurrent[other.valid]
        self.accepted = other.accepted
        if self.accepted:
            self._guesses[self.valid] = other._guesses[other.valid]

    def copy_prefix(self, other: LinearStates, length: int, end: int) -> None:
        """Takes the states after another sequence's first tokens, and its checkpoints up to there.

        Args:
            other: the states of the other sequence.
            length: number of tokens: `end`, or one of the checkpoints.
            end: number of all tokens of the other sequence.
        """
        if length == end:
            self.copy(other)
        else:
            other.checkpoints.load(self._state, length)
            self.accepted = 0
        self.checkpoints.copy(other.checkpoints, length)

    def reach(self, length: int, end: int) -> int:
        """Returns the most tokens, at most `length`, after which there is a state; `end` is the number of all."""
        return length if length == end else self.checkpoints.reach(length)

    def crop(self, length: int, end: int) -> None:
        """Makes the state after the first tokens valid: after all (`end`), after a checkpoint, or after none."""
        if length == end:
            return
        if length:
            self.checkpoints.load(self._state, length)
        self.checkpoints.crop(length)
        self.accepted = 0

    @property
    def _state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The valid copy."""
        return self._conv[self.valid], self._recurrent[self.valid]

    def copy_next(self, other: LinearStates) -> None:
        """Takes the states that a step of another sequence has written, in the copy that a step writes."""
        self._conv[1 - self.valid] = other._conv[1 - other.valid]
        self._recurrent[1 - self.valid] = other._recurrent[1 - other.valid]

    def clear(self) -> None:
        """Zeros the valid states, as for a sequence without tokens."""
        self._conv[self.valid].zero_()
        self._recurrent[self.valid].zero_()
        self.accepted = 0

    def commit(self, guesses: int | None = None, *, length: int = 0) -> None:
        """Makes the copy that the step wrote the valid one; of its guesses none is accepted yet.

        Args:
            length: number of tokens after the step; a checkpoint is saved where they are a mark.
            guesses: number of further guesses of the last step that were right: the next step takes them into the
                state; None: the step has ended.
        """
        if guesses is None:
            self.valid, self.accepted = 1 - self.valid, 0
            self.checkpoints.save(self._state, length)
        else:
            self.accepted += guesses


@dataclass(frozen=True)
class LayerState:
    """One layer's state of one sequence, with the cache interface of transformers' linear-attention modules.

    Args:
        conv: bf16 [1, channels, kernel], the last inputs of the convolution, as (before the step, after it).
        recurrent: float32 [1, heads, key_dim, value_dim], as (before the step, after it).
        fresh: whether the sequence has no token before the step.
        guesses: bf16 numbers, the rows of guesses of the step before, the accepted ones first; None: none is accepted.
        accepted: number of accepted guesses, whose rows `conv` and `recurrent` do not have.
    """

    conv: tuple[torch.Tensor, torch.Tensor]
    recurrent: tuple[torch.Tensor, torch.Tensor]
    fresh: bool
    guesses: torch.Tensor | None = None
    accepted: int = 0

    def earlier(self, size: int) -> torch.Tensor | None:
        """The rows of accepted guesses, bf16 [accepted, size]; None: the state has all tokens before the step."""
        return (
            None if self.guesses is None else self.guesses[: self.accepted * size].view(self.accepted, size)
        )

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
