"""KV of ended requests, kept for requests that begin with the same tokens (docs/decisions/0028)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from edgemoe.engine.engine import Engine
from edgemoe.engine.kept_index import Kept, KeptIndex, shared_tokens
from edgemoe.engine.kept_roots import KeptRoots
from edgemoe.errors import DoesNotFit
from edgemoe.kv.blocks import BLOCK, Tokens, chain
from edgemoe.kv.prefix_cache import PrefixCache
from edgemoe.kv.sequence import SequenceKV

LEAST_TOKENS = 8
"""Fewest tokens that are worth a copy, or a place."""

READ_BYTES = 32 << 20
"""Bytes of blocks that are read from disk between two steps: a chunk of a prompt takes longer to compute."""


@dataclass(eq=False)
class Reading:
    """Blocks on disk that a prompt begins with, and that its sequence lacks.

    Args:
        tokens: int64 [n], the prompt's first tokens, at least the tokens of all blocks.
        hashes: hashes of its beginnings.
        next, end: range of numbers of the blocks that are still to be read.
    """

    tokens: Tokens
    hashes: list[bytes]
    next: int
    end: int


class KeptSequences:
    """Sequences of running and of ended requests, within the budget's KV.

    A request is promised the plan's context, and takes bytes by blocks of tokens as it comes to them. Ended sequences
    have the rest; the least recently used leave as soon as a request needs their bytes. If a request continues all of a
    kept sequence, it takes the sequence over. If it shares only a prefix, the prefix is copied and the original is
    kept. For the thread that runs steps.

    A prefix cache has blocks on disk, too. A prompt whose beginning has more tokens there than in any sequence reads
    them (`read_blocks`), and blocks of every prompt and every ended sequence are written.

    Args:
        engine: the engine of the sequences.
        disk: blocks on disk; None: memory alone.

    Attributes:
        index: the sequences of ended requests.
        roots: the hashes of no tokens.
    """

    def __init__(self, engine: Engine, disk: PrefixCache | None = None) -> None:
        self._engine, self._disk = engine, disk
        self.roots = KeptRoots(engine)
        self.index = KeptIndex()
        self._running = dict[SequenceKV, bytes]()
        """Sequence of a request -> root of its hashes."""
        self._reading = dict[SequenceKV, Reading]()
        """Blocks on disk that are still to be read for a request's prompt."""

    @property
    def nbytes(self) -> int:
        """Bytes of the budget that kept sequences have."""
        return _bytes_of(self._engine, [kept.sequence for kept in self.index.entries])

    def sequence_for(
        self,
        tokens: Sequence[int],
        running: Iterable[tuple[Sequence[int], SequenceKV]] = (),
        whole: int | None = None,
    ) -> tuple[SequenceKV, int]:
        """Returns a sequence for a prompt, and how many of the prompt's first tokens it has.

        Args:
            tokens: the first tokens of the prompt that may come from another sequence.
            running: tokens and sequences of requests that run; copied from only.
            whole: tokens of the prompt; None: `tokens` are all of them.

        Raises:
            DoesNotFit: there is too little memory even without kept sequences; none of them has changed.
        """
        self._require_context()
        whole = whole or len(tokens)
        wanted, root = np.asarray(tokens, np.int64), self.roots.of(whole)
        hashes = chain(root, wanted)
        best = self.index.longest(wanted, hashes)
        for others, sequence in running:
            if self._running.get(sequence) == root:
                best = best.or_more(
                    Kept(np.asarray(others[: sequence.length], np.int64), sequence, []), wanted
                )
        if best.entry is None or best.tokens < LEAST_TOKENS:
            sequence, done = self._new(0), 0
        else:
            sequence, done = self._from(best.entry, best.tokens)
        self._running[sequence] = root
        blocks = self._disk.held(hashes) if self._disk else 0
        if blocks * BLOCK >= done + LEAST_TOKENS:
            self._reading[sequence] = Reading(wanted, hashes, done // BLOCK, blocks)
        if sequence.windows or sequence.states:
            shared = max(best.shared, self._disk.begun(hashes) * BLOCK if self._disk else 0)
            # Others have these tokens, but neither the window before their end nor the state: it stays this time.
            missing = shared >= max(done, blocks * BLOCK) + LEAST_TOKENS
            sequence.mark(shared if missing else None, whole)
        return sequence, done

    def read_blocks(self, sequence: SequenceKV) -> int | None:
        """Reads the next blocks of a request's prompt from disk, up to READ_BYTES.

        Returns:
            The tokens of the prompt that the sequence has now; None: there is nothing to read.

        Raises:
            as reserve.
        """
        reading = self._reading.get(sequence)
        if reading is None or self._disk is None:
            return None
        most = max(READ_BYTES // self._engine.shape.kv.bytes_for(BLOCK), 1)
        for index in range(reading.next, min(reading.next + most, reading.end)):
            block = range(index * BLOCK, (index + 1) * BLOCK)
            self.reserve(sequence, block.stop - sequence.length)
            windowed = index >= self._disk.first_windowed(reading.end)
            if not self._disk.read(sequence, reading.hashes, reading.tokens, index, windowed=windowed):
                reading.end, whole = index, sequence.whole
                sequence.crop(min(sequence.length, block.start))
                sequence.whole = whole
                break
            sequence.restore(block, windowed=windowed)
            reading.next = index + 1
        if reading.next >= reading.end:
            del self._reading[sequence]
            sequence.commit(0)  # windows that only the tokens in memory needed go
        return sequence.length

    def _require_context(self) -> None:
        """Raises DoesNotFit where one more whole context does not fit with the promised ones, with nothing kept."""
        each = self._engine.shape.kv.bytes_for(self._engine.plan.context)
        more = (len(self._running) + 1) * each - _bytes_of(self._engine, self._running) - self.nbytes
        self._engine.memory.require_kv(max(more, 0))

    def _from(self, best: Kept, shared: int) -> tuple[SequenceKV, int]:
        """A sequence that begins with the first tokens of another one: this one itself, or a copy."""
        mine = best in self.index.entries
        if mine and shared == len(best.tokens):
            self.index.remove(best)
            if best.sequence.windows:
                self._written(best.sequence)  # its earlier windows go as it grows
            return best.sequence, shared
        try:
            made = self._new(shared, but=best)
        except DoesNotFit:
            if not mine:
                raise
            self.index.remove(best)  # it would have to leave: its prefix need not
            self._written(best.sequence)
            return best.sequence, self._engine.sequences.crop(best.sequence, shared)
        if mine:
            self.index.use(best)
        return made, made.copy_prefix(best.sequence, shared)

    def _new(self, tokens: int, but: Kept | None = None) -> SequenceKV:
        """A new sequence with memory for so many tokens; kept sequences except `but` leave for it."""
        self._free(self._engine.sequences.bytes_to_reserve(tokens), but)
        return self._engine.sequences.new(reserve=tokens)

    def _free(self, nbytes: int, but: Kept | None = None) -> None:
        """Frees kept sequences, the least recently used first, until the budget has so many bytes.

        Where all of them are too few it frees none.
        """
        memory, others = self._engine.memory, [kept for kept in self.index.entries if kept is not but]
        if memory.free_kv_bytes + _bytes_of(self._engine, [kept.sequence for kept in others]) >= nbytes:
            while memory.free_kv_bytes < nbytes:
                self._drop(others.pop(0))

    def reserve(self, sequence: SequenceKV, rows: int) -> None:
        """Reserves the memory of a request's next tokens; kept sequences leave for it.

        Args:
            sequence: the sequence of the request.
            rows: number of tokens after its valid ones; together at most the context.

        Raises:
            DoesNotFit: a sequence without a request has taken memory that the request was promised.
        """
        tokens = min(sequence.length + rows, sequence.context)
        if tokens > sequence.reserved:
            self._free(self._engine.sequences.bytes_to_reserve(tokens, sequence))
            self._engine.sequences.reserve(sequence, tokens)

    def has_prompt(self, sequence: SequenceKV, tokens: Sequence[int]) -> None:
        """Has the blocks of a request's prompt written to disk while steps answer it."""
        root = self._running.get(sequence)
        if self._disk and self._disk.automatic and root is not None and root == self.roots.of(len(tokens)):
            known = np.asarray(tokens[: sequence.length], np.int64)
            self._disk.offer(sequence, chain(root, known), known)

    def save(self, tokens: Sequence[int]) -> None:
        """Begins to keep blocks on disk, also of the kept sequence that has most of the first tokens."""
        if self._disk:
            self._disk.start()
            wanted = np.asarray(tokens, np.int64)
            best = self.index.longest(wanted, chain(self.roots.of(len(tokens)), wanted)).entry
            if best:
                self._disk.offer(best.sequence, best.hashes, best.tokens)

    def saved(self, tokens: Sequence[int]) -> tuple[str, int]:
        """Returns the root of hashes with the present settings, in hex, and the number of first tokens on disk."""
        hashes = chain(self.roots.of(len(tokens)), np.asarray(tokens, np.int64))
        return hashes[0].hex(), self._disk.held(hashes) * BLOCK if self._disk else 0

    def keep(self, sequence: SequenceKV, tokens: Sequence[int]) -> None:
        """Takes the sequence of an ended request. If it continues a kept one, or the reverse, the shorter one is freed.

        A sequence of few tokens, or one whose settings have changed since its request began, is freed.

        Args:
            sequence: the sequence of the request.
            tokens: token ids; the sequence has the KV of the first ones.
        """
        root, known = self._leave(sequence), np.asarray(tokens[: sequence.length], np.int64)
        if len(known) < LEAST_TOKENS or root != self.roots.of(sequence.whole):
            self._end(sequence)
            return
        made = Kept(known, sequence, chain(root, known))
        for kept in self.index.beginning_with(root):
            if shared_tokens(kept, known) == len(kept.tokens):
                self._drop(kept)
        self.index.add(made)
        if self._disk:
            self._disk.offer(sequence, made.hashes, known)

    def discard(self, sequence: SequenceKV, tokens: Sequence[int]) -> None:
        """Frees the sequence of an ended request, and every kept one, as each may have its KV from the other.

        Args:
            sequence: the sequence of the request; its blocks are removed from the disk too.
            tokens: token ids; the sequence has the KV of the first ones.
        """
        root, known = self._leave(sequence), np.asarray(tokens[: sequence.length], np.int64)
        self._end(sequence)
        self.clear()
        if self._disk:
            self._disk.drop(chain(root, known))

    def _leave(self, sequence: SequenceKV) -> bytes:
        """Ends the request of a sequence; returns the root of its hashes."""
        if self._reading.pop(sequence, None):
            sequence.crop(sequence.length)  # blocks were still to be read: some tokens may lack their window
        return self._running.pop(sequence)

    def _end(self, sequence: SequenceKV) -> None:
        self._written(sequence)
        self._engine.sequences.end(sequence)

    def _written(self, sequence: SequenceKV) -> None:
        """Waits until no row of a sequence is being written to disk: they are about to change."""
        if self._disk:
            self._disk.release(sequence)

    def clear(self) -> None:
        """Frees every kept sequence."""
        for kept in list(self.index.entries):
            self._drop(kept)

    def _drop(self, entry: Kept) -> None:
        self.index.remove(entry)
        self._end(entry.sequence)

    def begin_again(self, sequence: SequenceKV, tokens: int) -> None:
        """Lets a request's sequence change from its first token on; its keys get rotary factors for so many tokens."""
        self._written(sequence)
        self._running[sequence] = self.roots.of(tokens)


def _bytes_of(engine: Engine, sequences: Iterable[SequenceKV]) -> int:
    """Bytes of the budget that some sequences have reserved."""
    return sum(map(engine.sequences.bytes_of, sequences))
