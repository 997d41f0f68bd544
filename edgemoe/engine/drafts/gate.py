"""The decision whether guesses pay: expected tokens of a step over its measured time."""

from __future__ import annotations

from collections.abc import Sequence

from edgemoe.policy.settings import MOST_DRAFTS

FIRST_STEPS = 4
"""Plain steps whose time is taken before the first guess: an engine's first steps are slow."""

_KEPT, _KEPT_TIME = 0.8, 0.95
"""The weight of an older observation after a new one: of guesses, and of times."""

_EXPECTED = ((1, 1.6), (7, 3.8))
"""Guesses, and the time of a step with them in plain steps, before any is measured."""

_PAYS = 1.03
"""Least expected gain of a step with guesses."""

_TRIAL, _TRIAL_LEAST, _TRIAL_GUESSES = 0.5, 4, 3
"""The least balance for a trial, in plain steps; its least proposed guesses, since few of them come by chance; and the
guesses that it checks."""

_LENT, _MOST_LENT = 0.005, 1.0
"""Share of the time of plain steps that guesses may lose, and most plain steps whose time they may lose at once."""

_MOST_SAVED = 8.0
"""Most plain steps whose time, saved by guesses before, they may lose at once."""

_GUESSING = 31
"""Steps with guesses after which a plain step is measured again."""


class StepTimes:
    """The time of a step by its guesses: plain steps, and a line through the others, whose old ones fade.

    A second row takes longer than a third one: it is the first that shares experts' weights with another.
    """

    def __init__(self) -> None:
        self.plain, self.steps = 0.0, 0
        self._sums = [0.0] * 5
        self.guessed = self._line()
        """Expected times of steps with 1, 2, ... MOST_DRAFTS guesses, in plain steps."""

    def observe(self, drafted: int, seconds: float) -> None:
        """Takes a step."""
        if drafted:
            new = _terms(drafted, seconds / self.plain)
            self._sums = [_KEPT_TIME * old + each for old, each in zip(self._sums, new, strict=True)]
            self.guessed = self._line()
        else:
            # A step that waits for a disk takes long once: it counts, but does not decide.
            share = max(1 - _KEPT_TIME, 1 / (self.steps + 1))
            self.plain, self.steps = self.plain + share * (seconds - self.plain), self.steps + 1

    def _line(self) -> list[float]:
        first, last = (_terms(*each) for each in _EXPECTED)
        ones, n, squares, times, products = map(sum, zip(self._sums, first, last, strict=True))
        slope = (ones * products - n * times) / (ones * squares - n * n)
        start = (times - slope * n) / ones
        return [max(start + slope * i, 1.0) for i in range(1, MOST_DRAFTS + 1)]


def _terms(drafted: int, time: float) -> tuple[float, ...]:
    """The terms of one observation in the sums that determine a line."""
    return 1.0, drafted, drafted * drafted, time, drafted * time


class Acceptance:
    """How often the guesses of one request were right lately."""

    def __init__(self) -> None:
        self._right, self._checked = 1.2, 2.0

    @property
    def rate(self) -> float:
        """The probability that a guess is right, where all guesses before it in the step were."""
        return self._right / self._checked

    def observe(self, drafted: int, accepted: int) -> None:
        """Takes one step: guesses, and how many of the first of them were right."""
        self._right = _KEPT * self._right + accepted
        self._checked = _KEPT * self._checked + accepted + (accepted < drafted)

    def best(self, times: Sequence[float]) -> tuple[float, int]:
        """Returns the largest expected gain, and its number of guesses, by the times of 1, 2, ... guesses."""
        gain, best, tokens, chance = 0.0, 0, 1.0, 1.0
        for count, time in enumerate(times, 1):
            chance *= self.rate
            tokens += chance
            if tokens > gain * time:
                gain, best = tokens / time, count
        return gain, best


class DraftGate:
    """Lets a request guess where that is expected to pay, and tries it now and then elsewhere.

    What guesses lose is limited: each plain step adds half a percent of its time to a balance, guesses that lose time
    take it out of there, and at 0 there are no more guesses. An engine has one gate, since the time of a step depends
    on where its experts lie.

    >>> gate, always = DraftGate(), Acceptance()
    >>> for _ in range(8):
    ...     gate.observe(drafted=0, accepted=0, seconds=0.1)
    ...     always.observe(drafted=4, accepted=4)
    >>> gate.limit(always, 7)
    7
    """

    def __init__(self) -> None:
        self._times, self._balance, self._guessing = StepTimes(), _TRIAL, 0

    @property
    def open(self) -> bool:
        """Whether the next step may have guesses, however likely they are to be right."""
        return self._times.steps >= FIRST_STEPS and self._guessing < _GUESSING and self._balance > 0

    def limit(self, acceptance: Acceptance, proposed_count: int) -> int:
        """Returns how many guesses the next step of a request may have; 0: none.

        Args:
            acceptance: how often the request's guesses were right.
            proposed_count: number of proposed guesses, 1 to MOST_DRAFTS; if more, they are likelier right.
        """
        if not self.open:
            return 0
        gain, count = acceptance.best(self._times.guessed[:proposed_count])
        if gain > _PAYS:
            return count
        return _TRIAL_GUESSES if self._balance >= _TRIAL and proposed_count >= _TRIAL_LEAST else 0

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        """Takes a step of one sequence.

        Args:
            drafted, accepted: its guesses, and how many of them were right.
            seconds: its time.
        """
        self._times.observe(drafted, seconds)
        self._guessing = self._guessing + 1 if drafted else 0
        if drafted:
            saved = 1 + accepted - seconds / self._times.plain
            self._balance = min(self._balance + saved, _MOST_SAVED)
        elif self._balance < _MOST_LENT:
            self._balance += _LENT
