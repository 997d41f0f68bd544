"""Guesses by look-up: after tokens that prompt or answer had before, the tokens that followed them then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch

from edgemoe.experts.records import StepTotals

LEAST_MATCH = 3
"""Last tokens that must have come before."""

MOST_MATCH = 16
"""Tokens of a match that are compared; longer matches count as this long."""


class NgramDrafter:
    """Looks the last tokens up among all earlier ones of one request, the latest place first.

    A match of n tokens gives at most n guesses: a long repetition goes on more surely than a short one.
    """

    computes = False

    def __init__(self) -> None:
        self._ends = dict[tuple[int, ...], int]()
        """Each LEAST_MATCH tokens -> the number of tokens up to their latest end."""
        self._indexed = 0

    def saw(self, first: int, states: torch.Tensor) -> None:
        """States do not matter to it."""

    def take_spent(self) -> StepTotals:
        """It computes nothing."""
        return StepTotals()

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Returns guesses, as Drafter.propose."""
        ends, last = self._ends, len(tokens)
        for end in range(max(self._indexed + 1, LEAST_MATCH), last):
            ends[tuple(tokens[end - LEAST_MATCH : end])] = end
        self._indexed = max(self._indexed, last - 1)
        end = ends.get(tuple(tokens[-LEAST_MATCH:]), 0)
        if not end:
            return []
        length = LEAST_MATCH
        while length < min(end, MOST_MATCH) and tokens[end - length - 1] == tokens[last - length - 1]:
            length += 1
        return list(tokens[end : end + min(limit, length)])

    def propose_all(self, parts: Sequence[tuple[Self, Sequence[int], int]]) -> list[list[int]]:
        """Returns guesses, as Drafter.propose_all."""
        return [drafter.propose(tokens, limit) if limit else [] for drafter, tokens, limit in parts]
