"""The decision whether guesses pay: expected tokens of a step over its measured time."""

from __future__ import annotations

from collections.abc import Sequence

from edgemoe.policy.settings import MOST_DRAFTS

FIRST_STEPS = 4
"""Plain steps whose time is taken before the first guess: an engine's first steps are slow."""

_KEPT, _KEPT_TIME = 0.8, 0.95
"""The weight of an older observation after a new one: of guesses, and of times."""

_FIRST_ROW, _ROW = 1.233, 0.367
"""Time per row before any is measured, in steps of one row: a step of n rows takes _FIRST_ROW + (n - 1) _ROW."""

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
    """The times of steps of some sequences by their guesses: plain steps, and a line through the others.

    Old steps fade. A second row takes longer than a third one: it is the first that shares experts with another.

    Args:
        sequences: number of sequences of the steps.

    Attributes:
        plain: seconds of a step without guesses.
        steps: number of steps without guesses.
        guessing: steps with guesses since the last one without.
    """

    def __init__(self, sequences: int) -> None:
        self.plain, self.steps, self.guessing = 0.0, 0, 0
        self._sums = [0.0] * 5
        counts = 1, MOST_DRAFTS
        self._expected = [
            _terms(count, _expected(sequences + count) / _expected(sequences)) for count in counts
        ]
        self._start, self._slope = self._line()

    def time(self, drafted: int) -> float:
        """Returns the expected time of a step with so many guesses, in steps without any."""
        return max(self._start + self._slope * drafted, 1.0)

    def observe(self, drafted: int, seconds: float) -> None:
        """Takes a step."""
        if drafted:
            self.guessing += 1
            new = _terms(drafted, seconds / self.plain)
            self._sums = [_KEPT_TIME * old + each for old, each in zip(self._sums, new, strict=True)]
            self._start, self._slope = self._line()
        else:
            # A step that waits for a disk takes long once: it counts, but does not decide.
            share = max(1 - _KEPT_TIME, 1 / (self.steps + 1))
            self.plain, self.steps = self.plain + share * (seconds - self.plain), self.steps + 1
            self.guessing = 0

    def _line(self) -> tuple[float, float]:
        ones, n, squares, times, products = map(sum, zip(self._sums, *self._expected, strict=True))
        slope = (ones * products - n * times) / (ones * squares - n * n)
        return (times - slope * n) / ones, slope


def _expected(rows: int) -> float:
    """The time of a step of so many rows before any is measured, in steps of one row."""
    return 1.0 if rows == 1 else _FIRST_ROW + _ROW * (rows - 1)


def _terms(drafted: int, time: float) -> tuple[float, ...]:
    """The terms of one observation in the sums that determine a line."""
    return 1.0, drafted, drafted * drafted, time, drafted * time


class Acceptance:
    """How often the guesses of one request were right lately.

    Args:
        likely: whether guesses are likely to be right before any has been checked.
    """

    def __init__(self, *, likely: bool = False) -> None:
        self._right, self._checked = (1.6 if likely else 1.2), 2.0

    @property
    def rate(self) -> float:
        """The probability that a guess is right, where all guesses before it in the step were."""
        return self._right / self._checked

    def observe(self, drafted: int, accepted: int) -> None:
        """Takes one step: guesses, and how many of the first of them were right."""
        self._right = _KEPT * self._right + accepted
        self._checked = _KEPT * self._checked + accepted + (accepted < drafted)


class DraftGate:
    """Lets requests guess where that is expected to pay, and tries it now and then elsewhere.

    What guesses lose is limited: each plain step adds half a percent of its time to a balance, guesses that lose time
    take it out of there, and at 0 there are no more guesses. An engine has one gate, since the time of a step depends
    on where its experts lie. Steps of one sequence, of two and so on have times of their own.

    >>> gate, always = DraftGate(), Acceptance()
    >>> for _ in range(8):
    ...     gate.observe(1, drafted=0, accepted=0, seconds=0.1)
    ...     always.observe(drafted=4, accepted=4)
    >>> gate.counts([always], [7], 7)
    [7]
    """

    def __init__(self) -> None:
        self._times, self._balance = dict[int, StepTimes](), _TRIAL

    def open(self, sequences: int) -> bool:
        """Whether the next step of so many sequences may have guesses, however likely they are to be right."""
        times = self._of(sequences)
        return times.steps >= FIRST_STEPS and times.guessing < _GUESSING and self._balance > 0

    def counts(
        self,
        acceptances: Sequence[Acceptance],
        proposed: Sequence[int],
        limit: int,
        *,
        computed: bool = False,
    ) -> list[int]:
        """Returns how many guesses each request of the next step may have.

        The likeliest guesses of all requests come first, as many as give the most expected tokens for the step's time.

        Args:
            acceptances: how often each request's guesses were right.
            proposed: number of proposed guesses of each request, 0 to MOST_DRAFTS; if more, they are likelier right.
            limit: most guesses of the step.
            computed: guesses are made whatever the tokens are: their number says nothing.
        """
        counts = [0] * len(proposed)
        if not self.open(len(proposed)):
            return counts
        ranked = sorted(
            (-(acceptance.rate**place), place, request)
            for request, acceptance in enumerate(acceptances)
            for place in range(1, proposed[request] + 1)
        )
        times, tokens, gain, best = self._of(len(proposed)), float(len(proposed)), 0.0, 0
        for count, (chance, _, _) in enumerate(ranked[:limit], 1):
            tokens -= chance
            if tokens > gain * times.time(count):
                gain, best = tokens / times.time(count), count
        if gain > _PAYS * len(proposed):
            for _, _, request in ranked[:best]:
                counts[request] += 1
        elif self._balance >= _TRIAL and (computed or max(proposed) >= _TRIAL_LEAST):
            counts[proposed.index(max(proposed))] = min(_TRIAL_GUESSES, limit)
        return counts

    def observe(self, sequences: int, drafted: int, accepted: int, seconds: float) -> None:
        """Takes a step.

        Args:
            sequences: number of its sequences.
            drafted, accepted: its guesses, and how many of them were right.
            seconds: its time.
        """
        times = self._of(sequences)
        times.observe(drafted, seconds)
        if drafted:
            saved = 1 + accepted / sequences - seconds / times.plain
            self._balance = min(self._balance + saved, _MOST_SAVED)
        elif self._balance < _MOST_LENT:
            self._balance += _LENT

    def lose(self, sequences: int, seconds: float) -> None:
        """Takes the time of guesses that no step of so many sequences checks."""
        times = self._of(sequences)
        if times.plain:
            self._balance -= seconds / times.plain

    def _of(self, sequences: int) -> StepTimes:
        if sequences not in self._times:
            self._times[sequences] = StepTimes(sequences)
        return self._times[sequences]
