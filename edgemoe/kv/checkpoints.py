"""States of linear attention after some earlier tokens, to which a sequence can go back (docs/decisions/0081)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgemoe.kv.blocks import BLOCK

COUNT = 2
"""Checkpoints of a sequence."""

TAIL = 8
"""Tokens between the checkpoint of a prompt and its end. They are the beginning of the answer in most chat templates,
which a later turn may write in another way: without a tag of reasoning, for example."""


class Checkpoints:
    """The states of one sequence after some earlier tokens.

    They are at two marks, as the windows of other layers are (edgemoe.kv.windows): where other requests went on in
    another way, and shortly before the end of the prompt. A step of a prompt ends at a mark (`following`). Until other
    requests are known, the first place has the second one's state of the prompt before: the last turn may be edited.

    A mark is worth a step of its own from a block of tokens on: fewer are computed again.

    Args:
        parts: the tensors of one copy of a state.
        count: states to keep: COUNT, or 0 where nothing is ever marked.
    """

    def __init__(self, parts: Sequence[torch.Tensor], count: int = COUNT) -> None:
        self._marks, self._tokens = [0] * count, [0] * count
        self._stored = [part.new_empty((count, *part.shape)) for part in parts]

    def mark(self, shared: int | None, prompt: int, length: int) -> None:
        """Sets the marks.

        Args:
            shared: tokens that the sequence has in common with others; None: as before.
            prompt: number of tokens of the whole prompt.
            length: number of tokens that the sequence has.
        """
        if shared is not None and shared >= length + BLOCK:
            self._marks[0] = shared
        elif shared is None and not self._marks[0] and self._tokens[1]:
            self._write(0, [stored[1] for stored in self._stored], self._tokens[1])
        self._marks[1] = prompt - TAIL if prompt >= BLOCK else 0

    def following(self, length: int) -> int | None:
        """Returns the first mark after so many tokens; None: there is none."""
        return min((mark for mark in self._marks if mark > length), default=None)

    def reach(self, length: int) -> int:
        """Returns the most tokens, at most `length`, after which a state is here; 0: there is none."""
        return max((tokens for tokens in self._tokens if tokens <= length), default=0)

    def save(self, parts: Sequence[torch.Tensor], length: int) -> None:
        """Saves the state after `length` tokens where they are a mark.

        Args:
            parts: the tensors of the state.
            length: number of tokens.
        """
        for slot, mark in enumerate(self._marks):
            if length and mark == length:
                self._write(slot, parts, length)

    def load(self, parts: Sequence[torch.Tensor], length: int) -> None:
        """Writes the state after `length` tokens, a number from `reach`, into the tensors of a state."""
        slot = self._tokens.index(length)
        for part, stored in zip(parts, self._stored, strict=True):
            part.copy_(stored[slot])

    def crop(self, length: int) -> None:
        """Forgets what is after so many tokens."""
        self._tokens = [tokens if tokens <= length else 0 for tokens in self._tokens]
        self._marks = [mark if mark <= length else 0 for mark in self._marks]

    def copy(self, other: Checkpoints, length: int) -> None:
        """Takes over another sequence's states after at most `length` tokens."""
        self._marks, self._tokens = [0] * COUNT, [0] * COUNT
        for slot, tokens in enumerate(other._tokens):
            if 0 < tokens <= length:
                self._marks[slot] = tokens if other._marks[slot] == tokens else 0
                self._write(slot, [stored[slot] for stored in other._stored], tokens)

    def _write(self, slot: int, parts: Sequence[torch.Tensor], tokens: int) -> None:
        for stored, part in zip(self._stored, parts, strict=True):
            stored[slot].copy_(part)
        self._tokens[slot] = tokens
