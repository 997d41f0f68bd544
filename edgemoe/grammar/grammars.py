"""Compiles a model's grammars one after another, and keeps the last ones."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from hashlib import sha256

from edgemoe.errors import UserError
from edgemoe.grammar.confined import Cancellation
from edgemoe.grammar.lark import Form, Reasoning, formed_answer
from edgemoe.grammar.matcher import Grammar, Vocabulary
from edgemoe.grammar.process import GRAMMAR_BYTES

MOST_KEPT = 64
"""Grammars, and refusals of grammars, that are kept for later answers."""

MOST_BYTES = 1 << 30
"""Memory of all grammars that are kept or in use, and of the one that is compiled."""

_SLICE_SECONDS = 0.05
"""Time of one wait until another grammar is no more in use."""


class Grammars:
    """Compiles grammars in turn and keeps the last ones. Thread-safe.

    Args:
        vocabulary: the model's tokens.
        most_bytes: memory of all grammars.
    """

    def __init__(self, vocabulary: Vocabulary, most_bytes: int = MOST_BYTES) -> None:
        self.vocabulary, self._most = vocabulary, most_bytes
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._kept: OrderedDict[bytes, Grammar | UserError] = OrderedDict()
        self._alive: weakref.WeakSet[Grammar] = weakref.WeakSet()

    def compile(self, text: str, cancellation: Cancellation | None = None) -> Grammar:
        """Returns a grammar, compiled or kept.

        Args:
            text: the text of the grammar (edgemoe.grammar.lark).
            cancellation: ends the wait and the compilation from another thread.

        Raises:
            UserError, Cancelled: as Grammar.
        """
        key, cancellation = sha256(text.encode()).digest(), cancellation or Cancellation()
        if (kept := self._of(key)) is not None:
            return kept
        while not self._turn.acquire(timeout=_SLICE_SECONDS):
            cancellation.require_wanted()
        try:
            if (kept := self._of(key)) is not None:
                return kept
            self._make_room(cancellation)
            cancellation.begun = True
            try:
                made: Grammar | UserError = Grammar(self.vocabulary, text, cancellation)
            except UserError as error:
                made = error
            self._keep(key, made)
        finally:
            self._turn.release()
        return _given(made)

    def formed(
        self,
        form: Form,
        reasoning: Reasoning | None = None,
        cancellation: Cancellation | None = None,
    ) -> Grammar:
        """Returns the grammar of an answer that has a form.

        Args:
            form: the form.
            reasoning: reasoning that may come before the answer.
            cancellation: ends the wait and the compilation from another thread.

        Raises:
            UserError: a part of it cannot be enforced; as compile.
            Cancelled: as compile.
        """
        return self.compile(formed_answer(self.vocabulary, form, reasoning), cancellation)

    def _of(self, key: bytes) -> Grammar | None:
        with self._lock:
            kept = self._kept.get(key)
            if isinstance(kept, Grammar) and kept.ended:
                del self._kept[key]
                return None
            if kept is not None:
                self._kept.move_to_end(key)
        return None if kept is None else _given(kept)

    def _keep(self, key: bytes, result: Grammar | UserError) -> None:
        with self._lock:
            self._kept[key] = result
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            if isinstance(result, Grammar):
                self._alive.add(result)

    def _make_room(self, cancellation: Cancellation) -> None:
        """Waits until there is memory for one more grammar; drops kept ones that have not been used for longest."""
        while True:
            with self._lock:
                while self._used() > self._most - GRAMMAR_BYTES and self._kept:
                    self._kept.popitem(last=False)
                if self._used() <= self._most - GRAMMAR_BYTES:
                    return
            cancellation.require_wanted()
            time.sleep(_SLICE_SECONDS)

    def _used(self) -> int:
        return sum(grammar.bytes for grammar in self._alive)


def _given(result: Grammar | UserError) -> Grammar:
    if isinstance(result, Grammar):
        return result
    raise UserError(result.expectation, result.finding, result.action)
