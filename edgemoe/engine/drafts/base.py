"""The contract of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Guesses at the tokens that follow in one answer. It never changes the answer: wrong guesses only cost time.

    >>> from edgemoe.engine.drafts.ngram import NgramDrafter
    >>> NgramDrafter().propose([7, 1, 2, 3, 9, 8, 1, 2, 3], 2)
    [9, 8]
    """

    def propose(self, tokens: Sequence[int], limit: int) -> list[int]:
        """Returns the next tokens, as far as there is a guess; [] where there is none.

        Args:
            tokens: ids of the prompt and of the answer so far; they begin with the tokens of the call before.
            limit: most guesses, at least 1.
        """
