"""Guesses for the requests of one engine: who guesses, how many, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from weakref import WeakKeyDictionary

import torch

from edgemoe.engine.drafts.base import Drafter
from edgemoe.engine.drafts.gate import Acceptance, DraftGate
from edgemoe.engine.drafts.ngram import NgramDrafter
from edgemoe.engine.request import Request
from edgemoe.experts.records import StepRecord
from edgemoe.kv.pictures import FIRST_ID
from edgemoe.kv.rotary_lengths import RotaryLengths


class Drafting:
    """Proposes guesses for the next step of some requests. Used by the thread that drives.

    Args:
        limit: returns the most guesses of a request in the next step (Engine.most_drafts); 0: it has none.
        rows: most rows of a step, with guesses.
        lengths: where the model's rotary factors change with the number of tokens; None: they do not.
        drafter: makes what guesses for one request.
        gate: decides how many guesses pay; None: a new one.
    """

    def __init__(
        self,
        limit: Callable[[], int],
        rows: int,
        lengths: RotaryLengths | None = None,
        drafter: Callable[[], Drafter] = NgramDrafter,
        gate: DraftGate | None = None,
    ) -> None:
        self._limit, self._rows, self._lengths = limit, rows, lengths
        self._drafter, self._gate = drafter, gate or DraftGate()
        self._requests = WeakKeyDictionary[Request, tuple[Drafter, Acceptance]]()
        self._stopped = WeakKeyDictionary[Request, bool]()
        self._made = list[tuple[Acceptance, int]]()
        """The numbers of guesses that were computed last, of requests with guesses to check."""
        self._lost = 0.0
        """Seconds of unchecked guesses in the record of the step whose tokens are chosen next."""

    def propose(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        """Returns guesses at the tokens after each request's last one, as many in all as are expected to pay.

        Guesses that an answer's grammar forbids are cut, and guesses after the answer's last token. A request whose
        drafter or grammar fails has no guesses from now on.
        """
        most = self._rows - len(requests)
        if not self._limit() or most < 1 or not self._gate.open(len(requests)):
            return [()] * len(requests)
        if self._of(requests[0])[0].computes:
            computed = zip(requests, self._computed(requests, most), strict=True)
            allowed = [self._allowed(request, guesses) for request, guesses in computed]
            self._note_forbidden(requests, allowed)
            return allowed
        proposed = [self._proposed(request) for request in requests]
        if not any(proposed):
            return [()] * len(requests)
        acceptances = [self._of(request)[1] for request in requests]
        counts = self._gate.counts(acceptances, [len(guesses) for guesses in proposed], most)
        return [
            self._allowed(request, guesses[:count])
            for request, guesses, count in zip(requests, proposed, counts, strict=True)
        ]

    def _proposed(self, request: Request) -> list[int]:
        """The guesses of a request's drafter, before it is decided how many pay."""
        limit = self._limit_of(request)
        if limit < 1:
            return []
        try:
            guesses = self._of(request)[0].propose(request.tokens, limit)
            return list(takewhile(lambda token: token < FIRST_ID, guesses))
        except Exception:
            self.stop(request)
            return []

    def _limit_of(self, request: Request) -> int:
        """The most guesses that a request may have in the next step."""
        sequence = request.sequence
        if sequence is None or request in self._stopped:
            return 0
        left = request.sampler.sampling.max_new_tokens - (len(request.tokens) - request.prompt)
        limit = max(min(self._limit(), left - 1, sequence.context - sequence.length - 1), 0)
        return self._lengths.alike(sequence.length + 1, limit) if self._lengths else limit

    def _computed(self, requests: Sequence[Request], total: int) -> list[list[int]]:
        """The guesses of drafters that compute them, whose number is decided first: at most `total` in all."""
        limits, self._made = [self._limit_of(request) for request in requests], []
        known = [self._of(request) for request in requests]
        if not any(limits):
            return [[] for _ in requests]
        counts = self._gate.counts([acceptance for _, acceptance in known], limits, total, computed=True)
        counts = [min(count, limit) for count, limit in zip(counts, limits, strict=True)]
        if not any(counts):
            return [[] for _ in requests]
        self._made = [(known[i][1], count) for i, count in enumerate(counts) if count]
        try:
            parts = [(known[i][0], request.tokens, counts[i]) for i, request in enumerate(requests)]
            return [
                list(takewhile(lambda token: token < FIRST_ID, guesses))
                for guesses in known[0][0].propose_all(parts)
            ]
        except Exception:
            for request in requests:
                self.stop(request)
            return [[] for _ in requests]

    def _note_forbidden(self, requests: Sequence[Request], allowed: Sequence[Sequence[int]]) -> None:
        """Counts the guesses of requests whose grammar forbids them all as wrong: no step checks them."""
        checked = [
            self._of(request)[1] for request, guesses in zip(requests, allowed, strict=True) if guesses
        ]
        for acceptance, count in self._made:
            if acceptance not in checked:
                acceptance.observe(count, 0)
        self._made = [made for made in self._made if made[0] in checked]

    def _allowed(self, request: Request, guesses: list[int]) -> tuple[int, ...]:
        """The first of some guesses, as far as the answer's grammar allows them."""
        try:
            return tuple(request.sampler.allowed(guesses)) if guesses else ()
        except Exception:
            self.stop(request)
            return ()

    def saw(self, request: Request, first: int, states: torch.Tensor) -> None:
        """Takes the states of a step's tokens for the request's drafter, as Drafter.saw."""
        self._of(request)[0].saw(first, states)

    def saw_tokens(self, requests: Sequence[Request], states: Sequence[torch.Tensor]) -> None:
        """Takes the states of a step of new tokens of some requests; of none, where no states are kept."""
        for request, rows in zip(requests, states, strict=False):
            assert request.sequence
            self.saw(request, request.sequence.length - 1, rows)

    def charge(self, requests: Sequence[Request], record: StepRecord | None) -> None:
        """Adds the time and the transfers of computed guesses to the record of the step that follows them.

        Where the step checks none of them, since the grammar forbids them all or the step failed, their time is lost
        and they count as wrong.

        Args:
            requests: the requests of the step.
            record: the step's record; None: it failed.
        """
        if requests[0] not in self._requests:
            return
        spent = self._of(requests[0])[0].take_spent()
        if not spent.steps:
            return
        if record:
            record.seconds += spent.seconds
            record.transfers = record.transfers + spent.transfers
        if record is None or not record.drafted:
            self._gate.lose(len(requests), spent.seconds)
            for acceptance, guesses in self._made:
                acceptance.observe(guesses, 0)
            self._lost = spent.seconds if record else 0.0

    def observe(self, request: Request, drafted: int, accepted: int) -> None:
        """Takes the guesses of a request in a step, and how many of them were right."""
        if drafted:
            self._of(request)[1].observe(drafted, accepted)

    def observe_step(self, record: StepRecord) -> None:
        """Takes a step of new tokens, once the tokens after it have been chosen."""
        lost, self._lost = self._lost, 0.0
        if self._limit():
            self._gate.observe(record.sequences, record.drafted, record.accepted, record.seconds - lost)

    def stop(self, request: Request) -> None:
        """Ends the guesses of a request: its drafter, its grammar or a step with its guesses failed."""
        self._stopped[request] = True

    def _of(self, request: Request) -> tuple[Drafter, Acceptance]:
        if request not in self._requests:
            drafter = self._drafter()
            self._requests[request] = drafter, Acceptance(likely=drafter.computes)
        return self._requests[request]
