"""KV of ended requests, kept for requests that begin with the same tokens (docs/decisions/0028)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from edgemoe.engine.engine import Engine
from edgemoe.kv.blocks import BLOCK, Tokens, chain
from edgemoe.kv.sequence import SequenceKV
from storage.errors import DoesNotFit

LEAST_TOKENS = 8
"""Fewest tokens that are worth a copy, or a place."""


@dataclass(eq=False)
class Kept:
    """A sequence whose request has ended.

    Args:
        tokens: int64 [n], of which it has the KV, all of them.
        sequence: not used by any step.
        hashes: of its beginnings (kv.blocks.chain).
    """

    tokens: Tokens
    sequence: SequenceKV
    hashes: list[bytes]


class KeptSequences:
    """Sequences of the requests that run, and of those that have ended, within the budget's KV.

    A request is promised the plan's context, and takes bytes by blocks of tokens as it comes to them. Ended sequences
    have the rest; the least recently used leave as soon as a request needs their bytes. A kept sequence moves to the
    request that continues all of it; of another one the prefix is copied, and it stays whole as long as it stays. For
    the thread that runs steps.

    Args:
        engine: of the sequences.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept = list[Kept]()
        """The most recently used last."""
        self._by_hash = defaultdict[bytes, list[Kept]](list)
        self._running = dict[SequenceKV, bytes]()
        """Sequence of a request -> root of its hashes."""

    @property
    def nbytes(self) -> int:
        """Bytes of the budget that kept sequences have."""
        return self._bytes_of(kept.sequence for kept in self._kept)

    def _bytes_of(self, sequences: Iterable[SequenceKV]) -> int:
        return sum(map(self._engine.bytes_of, sequences))

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
        self._require_context()
        wanted, root = np.asarray(tokens, np.int64), self._root()
        best, shared = self._longest(wanted, root)
        for others, sequence in running:
            if self._running.get(sequence) == root:
                other = Kept(np.asarray(others[: sequence.length], np.int64), sequence, [])
                if (longer := _shared(other, wanted)) > shared:
                    best, shared = other, longer
        if best is None or shared < LEAST_TOKENS:
            sequence, shared = self._new(0), 0
        else:
            sequence, shared = self._from(best, shared)
        self._running[sequence] = root
        return sequence, shared

    def _require_context(self) -> None:
        """Raises DoesNotFit where one more whole context does not fit beside those promised, with nothing kept."""
        each = self._engine.shape.kv.bytes_for(self._engine.plan.context)
        more = (len(self._running) + 1) * each - self._bytes_of(self._running) - self.nbytes
        self._engine.memory.require_kv(max(more, 0))

    def _longest(self, wanted: Tokens, root: bytes) -> tuple[Kept | None, int]:
        """The kept sequence with most of the wanted first tokens, and their number: by hashes, then token by token."""
        best, most = None, 0
        hashes = chain(root, wanted)
        for blocks in reversed(range(len(hashes))):
            for kept in self._by_hash.get(hashes[blocks], ()):
                if (shared := _shared(kept, wanted)) > most:
                    best, most = kept, shared
            if most >= blocks * BLOCK:
                break
        return best, most

    def _from(self, best: Kept, shared: int) -> tuple[SequenceKV, int]:
        """A sequence that begins with the first tokens of another one: this one itself, or a copy."""
        mine = best in self._kept
        if mine and shared == len(best.tokens):
            self._take(best)
            return best.sequence, shared
        try:
            made = self._new(shared, but=best)
        except DoesNotFit:
            if not mine:
                raise
            self._take(best)  # it would have to leave: its prefix need not
            return best.sequence, self._engine.crop(best.sequence, shared)
        if mine:
            self._kept.remove(best)
            self._kept.append(best)
        return made, made.copy_prefix(best.sequence, shared)

    def _new(self, tokens: int, but: Kept | None = None) -> SequenceKV:
        """A new sequence with memory for so many tokens; kept ones leave for it, `but` excepted."""
        self._free(self._engine.bytes_to_reserve(tokens), but)
        return self._engine.new_sequence(reserve=tokens)

    def _free(self, nbytes: int, but: Kept | None = None) -> None:
        """Frees kept sequences, the least recently used first, until the budget has so many bytes.

        Where all of them are too few it frees none.
        """
        memory, others = self._engine.memory, [kept for kept in self._kept if kept is not but]
        if memory.free_kv_bytes + self._bytes_of(kept.sequence for kept in others) >= nbytes:
            while memory.free_kv_bytes < nbytes:
                self._drop(others.pop(0))

    def reserve(self, sequence: SequenceKV, rows: int) -> None:
        """Reserves the memory of a request's next tokens; kept sequences leave for it.

        Args:
            sequence: of the request.
            rows: tokens behind its valid ones, at most the context.

        Raises:
            DoesNotFit: memory that the request was promised is taken by a sequence that is not of a request.
        """
        tokens = min(sequence.length + rows, sequence.context)
        if tokens > sequence.reserved:
            self._free(self._engine.bytes_to_reserve(tokens, sequence))
            self._engine.reserve_tokens(sequence, tokens)

    def keep(self, sequence: SequenceKV, tokens: Sequence[int]) -> None:
        """Takes the sequence of an ended request; frees it, or those that it continues, where one has all of another.

        A sequence of few tokens, or one whose settings have changed since its request began, is freed.

        Args:
            sequence: of the request.
            tokens: of which the first have their KV in the sequence.
        """
        root, known = self._running.pop(sequence), np.asarray(tokens[: sequence.length], np.int64)
        if len(known) < LEAST_TOKENS or root != self._root():
            self._engine.end_sequence(sequence)
            return
        made = Kept(known, sequence, chain(root, known))
        for kept in list(self._by_hash.get(root, ())):
            if _shared(kept, known) == len(kept.tokens):
                self._drop(kept)
        self._kept.append(made)
        for digest in made.hashes:
            self._by_hash[digest].append(made)

    def discard(self, sequence: SequenceKV) -> None:
        """Frees the sequence of an ended request, and every kept one, as each may have its KV from the other."""
        del self._running[sequence]
        self._engine.end_sequence(sequence)
        self.clear()

    def clear(self) -> None:
        """Frees every kept sequence."""
        while self._kept:
            self._drop(self._kept[0])

    def _drop(self, kept: Kept) -> None:
        self._take(kept)
        self._engine.end_sequence(kept.sequence)

    def _take(self, kept: Kept) -> None:
        self._kept.remove(kept)
        for digest in kept.hashes:
            self._by_hash[digest].remove(kept)
            if not self._by_hash[digest]:
                del self._by_hash[digest]

    def _root(self) -> bytes:
        """The hash of no tokens: of all that their KV depends on, the model, its settings and the KV's form."""
        engine, settings = self._engine, self._engine.settings
        damage = engine.damage.origin if engine.damage and settings.priced else None
        of_model = engine.store.manifest.source, engine.shape.kv
        parts = of_model, settings.levels_by, settings.remapping, settings.compensation, damage
        return xxhash.xxh3_128_digest(repr(parts).encode())


def _shared(kept: Kept, tokens: Tokens) -> int:
    """Tokens that a prompt can take of a kept sequence; all or none where linear attention has a later state only."""
    n = min(len(kept.tokens), len(tokens))
    different = np.flatnonzero(kept.tokens[:n] != tokens[:n])
    shared = int(different[0]) if len(different) else n
    return 0 if kept.sequence.states and shared < len(kept.tokens) else shared
