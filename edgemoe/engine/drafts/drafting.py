"""Guesses for the requests of one engine: who guesses, how many, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from weakref import WeakKeyDictionary

from edgemoe.engine.drafts.base import Drafter
from edgemoe.engine.drafts.gate import Acceptance, DraftGate
from edgemoe.engine.drafts.ngram import NgramDrafter
from edgemoe.engine.request import Request
from edgemoe.kv.pictures import FIRST_ID


class Drafting:
    """Proposes guesses for the next step of a request. Used by the thread that drives.

    Args:
        limit: returns the most guesses in the next step (Engine.most_drafts); 0: it has none.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit, self._gate = limit, DraftGate()
        self._requests = WeakKeyDictionary[Request, tuple[Drafter, Acceptance]]()
        self._stopped = WeakKeyDictionary[Request, bool]()

    def propose(self, request: Request) -> tuple[int, ...]:
        """Returns guesses at the tokens after a request's last one, as many as are expected to pay.

        Guesses that the answer's grammar forbids are cut, and guesses after the answer's last token.
        """
        sequence = request.sequence
        limit = self._limit()
        if not limit or sequence is None or request in self._stopped:
            return ()
        left = request.sampler.sampling.max_new_tokens - (len(request.tokens) - request.prompt)
        limit = min(limit, left - 1, sequence.context - sequence.length - 1)
        if limit < 1:
            return ()
        guesses = self.guesses(request, limit)
        return tuple(request.sampler.allowed(guesses)) if guesses else ()

    def guesses(self, request: Request, limit: int) -> list[int]:
        """Returns guesses of a request's drafter, as many as are expected to pay; at most `limit`, 1 or more."""
        if not self._gate.open:
            return []
        drafter, acceptance = self._of(request)
        guesses = drafter.propose(request.tokens, limit)
        guesses = list(takewhile(lambda token: token < FIRST_ID, guesses))
        return guesses[: self._gate.limit(acceptance, len(guesses))] if guesses else []

    def observe(self, request: Request, drafted: int, accepted: int, seconds: float) -> None:
        """Takes a step of a request alone: its guesses, how many were right, and its time."""
        if self._limit():
            self._gate.observe(drafted, accepted, seconds)
            if drafted:
                self._of(request)[1].observe(drafted, accepted)

    def stop(self, request: Request) -> None:
        """Ends the guesses of a request: a step failed that had some, and runs again without."""
        self._stopped[request] = True

    def _of(self, request: Request) -> tuple[Drafter, Acceptance]:
        return self._requests.setdefault(request, (NgramDrafter(), Acceptance()))
