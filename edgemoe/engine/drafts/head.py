"""Guesses by the model's own head for further tokens (docs/decisions/0075)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Self

import torch

from edgemoe.engine.drafts.base import Drafter
from edgemoe.engine.drafts.head_runner import HeadPart, HeadRunner
from edgemoe.engine.drafts.ngram import NgramDrafter
from edgemoe.errors import EdgemoeError
from edgemoe.experts.records import StepTotals
from edgemoe.kv.pictures import FIRST_ID
from edgemoe.models.store_head import HEAD_STATES, HEAD_TOKENS


def new_drafter(runner: HeadRunner | None) -> Drafter:
    """Makes what guesses the next tokens of one request: an engine's head, or look-up where it has none."""
    return HeadDrafter(runner) if runner else NgramDrafter()


class HeadDrafter:
    """Guesses the next tokens of one request by the head. Implements Drafter.

    It keeps the request's latest states, and the head computes them when guesses are wanted. So a request costs nothing
    while no guesses pay. The head sees the latest HEAD_STATES tokens, and the tokens that it has computed since; of a
    prompt with pictures the tokens after the last one, because the head has no embeddings of pictures.

    Args:
        runner: the engine's.
    """

    computes = True

    def __init__(self, runner: HeadRunner) -> None:
        self._runner = runner
        self._states = deque[tuple[int, torch.Tensor]]()
        """The position of the first of some consecutive states, and the states, in the order of their positions."""
        self._first = 0
        """The position of the head's first token's state, while the runner has keys and values of this drafter."""

    def saw(self, first: int, states: torch.Tensor) -> None:
        """Takes the states bf16 [rows, H] of consecutive tokens, from position `first` on; later ones are forgotten."""
        self._cut(first)
        self._states.append((first, states))
        end = first + len(states)
        while self._states[0][0] + len(self._states[0][1]) <= end - HEAD_STATES:
            self._states.popleft()

    def take_spent(self) -> StepTotals:
        """Returns the time and the transfers of the head since the last call."""
        return self._runner.take_spent()

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Returns guesses, as Drafter.propose: `limit` of them, or none where states are missing or a read fails."""
        return self.propose_all([(self, tokens, limit)])[0]

    def propose_all(self, parts: Sequence[tuple[Self, Sequence[int], int]]) -> list[list[int]]:
        """Returns guesses, as Drafter.propose_all: the rows of all answers go through the head together."""
        able = [(*part, i) for i, part in enumerate(parts) if part[2] and part[0]._has_states(part[1])]
        guesses = [list[int]() for _ in parts]
        try:
            for own, (*_, i) in zip(self._guesses([part[:3] for part in able]), able, strict=True):
                guesses[i] = own
        except EdgemoeError:
            for drafter, *_ in able:
                self._runner.forget(drafter)
        return guesses

    def _has_states(self, tokens: Sequence[int]) -> bool:
        """Whether the state before the last token is there; forgets states of tokens that were wrong."""
        end = len(tokens) - 1
        self._cut(end)
        return bool(self._states) and self._states[-1][0] + len(self._states[-1][1]) == end

    def _guesses(self, parts: Sequence[tuple[Self, Sequence[int], int]]) -> list[list[int]]:
        runner = self._runner
        run = [drafter._part(tokens, limit) for drafter, tokens, limit in parts]
        guesses, lengths = (
            [list[int]() for _ in parts],
            [part.sequence.length + len(part.tokens) for part in run],
        )
        numbers = list(range(len(parts)))
        while numbers:
            following = list[HeadPart]()
            for i, part, (logits, state) in zip(numbers, run, runner.run(run), strict=True):
                guesses[i].append(int(logits.argmax()))
                following.append(HeadPart(part.sequence, guesses[i][-1:], state))
            more = [len(guesses[i]) < parts[i][2] for i in numbers]
            for part, i, going_on in zip(run, numbers, more, strict=True):
                if not going_on:
                    part.sequence.crop(lengths[i])
            numbers = [each for each, on in zip(numbers, more, strict=True) if on]
            run = [each for each, on in zip(following, more, strict=True) if on]
        return guesses

    def _part(self, tokens: Sequence[int], limit: int) -> HeadPart:
        """The tokens that the head has not seen, with their states; keys and values that do not lead there go."""
        sequence, oldest, end = self._runner.sequence_of(self), self._states[0][0], len(tokens) - 1
        begin = self._first + sequence.length
        room = sequence.length + end - begin + limit <= HEAD_TOKENS
        if not sequence.length or not oldest <= begin < end or not room:
            first = max(oldest, end - HEAD_STATES)
            pictures = (number for number in range(end - 1, first, -1) if tokens[number] >= FIRST_ID)
            begin = self._first = next(pictures, first)
            sequence.crop(0)
        return HeadPart(sequence, tokens[begin + 1 : end + 1], self._runner.normed(self._from(begin)))

    def _from(self, position: int) -> torch.Tensor:
        """The kept states from a position on, [rows, H]."""
        return torch.cat([rows[max(position - first, 0) :] for first, rows in self._states])

    def _cut(self, end: int) -> None:
        """Forgets the states from a position on, and all states where some before it are missing."""
        while self._states and self._states[-1][0] >= end:
            self._states.pop()
        if self._states:
            first, rows = self._states[-1]
            if first + len(rows) > end:
                self._states[-1] = first, rows[: end - first]
            elif first + len(rows) < end:
                self._states.clear()
