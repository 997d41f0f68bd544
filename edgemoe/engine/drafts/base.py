"""The contract of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch

from edgemoe.experts.records import StepTotals


class Drafter(Protocol):
    """Guesses at the tokens that follow in one answer. It never changes the answer: wrong guesses only cost time.

    >>> from edgemoe.engine.drafts.ngram import NgramDrafter
    >>> NgramDrafter().propose([7, 1, 2, 3, 9, 8, 1, 2, 3], 2)
    [9, 8]

    Attributes:
        computes: whether guesses take the time of a computation: their number is decided before they are made.
    """

    computes: bool

    def saw(self, first: int, states: torch.Tensor) -> None:
        """Takes the states of some tokens of the answer or its prompt, as the model has computed them.

        Args:
            first: position of the first of these tokens.
            states: bf16 [rows, H], after the last layer, before the model's last norm. The last rows may belong to
                guesses that turn out to be wrong; states from their positions on replace them.
        """

    def take_spent(self) -> StepTotals:
        """Returns the time and the transfers of its computations since the last call."""

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Returns the next tokens, as far as there is a guess; [] where there is none.

        Args:
            tokens: ids of the prompt and of the answer so far; they begin with the tokens of the call before.
            limit: most guesses, at least 1.
        """

    def propose_all(self, parts: Sequence[tuple[Self, Sequence[int], int]]) -> list[list[int]]:
        """Returns the guesses of several drafters of one engine; where they compute, they do so together.

        Args:
            parts: a drafter, its tokens and its most guesses, once per answer; 0: it is to have none.
        """
