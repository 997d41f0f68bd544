"""KV of ended requests, kept for requests that begin with the same tokens (docs/decisions/0028)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgemoe.engine.engine import Engine
from edgemoe.kv.sequence import SequenceKV
from storage.errors import DoesNotFit

LEAST_TOKENS = 8
"""Fewest tokens that are worth a copy, or a place."""

Tokens = npt.NDArray[np.int64]
Fingerprint = tuple[object, ...]


@dataclass(eq=False)
class Kept:
    """A sequence whose request has ended.

    Args:
        tokens: of which it has the KV, all of them.
        sequence: not used by any step.
        fingerprint: of the settings that computed it; model and form of KV are the engine's.
    """

    tokens: Tokens
    sequence: SequenceKV
    fingerprint: Fingerprint


class KeptSequences:
    """Sequences within the budget's KV, the least recently used first to leave. For the thread that runs steps.

    Every sequence has the plan's context, so that a conversation can grow where it is. Tokens are compared one by one.
    A kept sequence moves to the request that continues all of it; of another one the prefix is copied, so that it stays
    whole, except where there is memory for one of the two only.

    Args:
        engine: of the sequences.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._kept = engine, list[Kept]()

    @property
    def bytes(self) -> int:
        """Bytes of the budget that kept sequences have."""
        return len(self._kept) * self._each

    @property
    def _each(self) -> int:
        return self._engine.shape.kv.bytes_for(self._engine.plan.context)

    def sequence_for(
        self, tokens: Sequence[int], running: Iterable[tuple[Sequence[int], SequenceKV]] = ()
    ) -> tuple[SequenceKV, int]:
        """Returns a sequence for a prompt, and how many of the prompt's first tokens it has.

        Args:
            tokens: of the prompt, those that may come from another sequence.
            running: tokens and sequences of requests that run; copied from only.

        Raises:
            DoesNotFit: there is too little memory even without kept sequences; none of them has changed.
        """
        wanted, now = np.asarray(tokens, np.int64), _fingerprint(self._engine)
        found = [kept for kept in self._kept if kept.fingerprint == now]
        found += [Kept(np.asarray(t[: s.length], np.int64), s, now) for t, s in running]
        shared = [_shared(kept, wanted) for kept in found]
        most = max(shared, default=0)
        if most < LEAST_TOKENS:
            return self._new(), 0
        return self._from(found[shared.index(most)], most)

    def _from(self, best: Kept, shared: int) -> tuple[SequenceKV, int]:
        """A sequence that begins with the first tokens of another one: this one itself, or a copy."""
        mine = best in self._kept
        if mine and shared == len(best.tokens):
            self._kept.remove(best)
            return best.sequence, shared
        try:
            made = self._new(but=best)
        except DoesNotFit:
            if not mine:
                raise
            self._kept.remove(best)
            return best.sequence, best.sequence.crop(shared)
        if mine:
            self._kept.remove(best)
            self._kept.append(best)  # now the most recently used
        return made, made.copy_prefix(best.sequence, shared)

    def _new(self, but: Kept | None = None) -> SequenceKV:
        """A new sequence; kept ones leave for it, `but` excepted, if that is enough."""
        others, budget = [kept for kept in self._kept if kept is not but], self._engine.budget
        if budget.limit - budget.used + len(others) * self._each >= self._each:
            while budget.limit - budget.used < self._each:
                self._drop(others.pop(0))
        return self._engine.new_sequence()

    def keep(self, sequence: SequenceKV, tokens: Sequence[int]) -> None:
        """Takes the sequence of an ended request; frees it, or those that it continues, where one has all of another.

        Args:
            sequence: of the request.
            tokens: of which the first have their KV in the sequence.
        """
        made = Kept(np.asarray(tokens[: sequence.length], np.int64), sequence, _fingerprint(self._engine))
        if len(made.tokens) < LEAST_TOKENS:
            self._engine.end_sequence(sequence)
            return
        for kept in list(self._kept):
            if kept.fingerprint == made.fingerprint and _shared(kept, made.tokens) == len(kept.tokens):
                self._drop(kept)
        self._kept.append(made)

    def clear(self) -> None:
        """Frees every kept sequence."""
        while self._kept:
            self._drop(self._kept[0])

    def _drop(self, kept: Kept) -> None:
        self._kept.remove(kept)
        self._engine.end_sequence(kept.sequence)


def _fingerprint(engine: Engine) -> Fingerprint:
    settings = engine.settings
    return settings.levels, settings.exact


def _shared(kept: Kept, tokens: Tokens) -> int:
    """Tokens that a prompt can take of a kept sequence; all or none where linear attention has a later state only."""
    n = min(len(kept.tokens), len(tokens))
    different = np.flatnonzero(kept.tokens[:n] != tokens[:n])
    shared = int(different[0]) if len(different) else n
    return 0 if kept.sequence.states and shared < len(kept.tokens) else shared
