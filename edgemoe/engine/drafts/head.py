"""Guesses by the model's own head for further tokens (docs/decisions/0075)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from edgemoe.engine.drafts.base import Drafter
from edgemoe.engine.drafts.head_runner import HeadRunner
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
        """The position of the head's first token's state, while this is the runner's owner."""

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
        end = len(tokens) - 1
        self._cut(end)
        if not self._states or self._states[-1][0] + len(self._states[-1][1]) != end:
            return []
        try:
            return self._guesses(tokens, end, limit)
        except EdgemoeError:
            self._runner.owner = None
            return []

    def _guesses(self, tokens: Sequence[int], end: int, limit: int) -> list[int]:
        runner = self._runner
        begin = self._begin(tokens, limit)
        logits, state = runner.run(tokens[begin + 1 : end + 1], runner.normed(self._from(begin)))
        guesses, length = [int(logits.argmax())], runner.length
        while len(guesses) < limit:
            logits, state = runner.run(guesses[-1:], state)
            guesses.append(int(logits.argmax()))
        runner.crop(length)
        return guesses

    def _begin(self, tokens: Sequence[int], limit: int) -> int:
        """The position of the first state that the head has to compute; it forgets what does not lead there."""
        runner, oldest, end = self._runner, self._states[0][0], len(tokens) - 1
        begin = self._first + runner.length
        room = runner.length + end - begin + limit <= HEAD_TOKENS
        if runner.owner is not self or not oldest <= begin < end or not room:
            first = max(oldest, end - HEAD_STATES)
            pictures = (number for number in range(end - 1, first, -1) if tokens[number] >= FIRST_ID)
            runner.owner, self._first = self, next(pictures, first)
            runner.crop(0)
            begin = self._first
        return begin

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
