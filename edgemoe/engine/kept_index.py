"""Kept sequences by the hashes of their beginnings, and by when they were last used."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from edgemoe.kv.blocks import BLOCK, Tokens
from edgemoe.kv.sequence import SequenceKV


@dataclass(eq=False)
class Kept:
    """A sequence whose request has ended.

    Args:
        tokens: int64 [n], of which it has the KV, all of them.
        sequence: not used by any step.
        hashes: hashes of its beginnings (kv.blocks.chain).
    """

    tokens: Tokens
    sequence: SequenceKV
    hashes: list[bytes]


class KeptIndex:
    """Finds the kept sequence that begins as a prompt does. For the thread that runs steps.

    Attributes:
        entries: all of them, the most recently used last.
    """

    def __init__(self) -> None:
        self.entries: list[Kept] = []
        self._by_hash = defaultdict[bytes, list[Kept]](list)

    def add(self, entry: Kept) -> None:
        """Adds a sequence, as the most recently used one."""
        self.entries.append(entry)
        for digest in entry.hashes:
            self._by_hash[digest].append(entry)

    def remove(self, entry: Kept) -> None:
        """Removes a sequence."""
        self.entries.remove(entry)
        for digest in entry.hashes:
            self._by_hash[digest].remove(entry)
            if not self._by_hash[digest]:
                del self._by_hash[digest]

    def use(self, entry: Kept) -> None:
        """Makes a sequence the most recently used one."""
        self.entries.remove(entry)
        self.entries.append(entry)

    def beginning_with(self, digest: bytes) -> list[Kept]:
        """The sequences of which a hash is `digest`."""
        return list(self._by_hash.get(digest, ()))

    def longest(self, tokens: Tokens, hashes: list[bytes]) -> Match:
        """Finds the sequence that can give most of the wanted first tokens, by hashes and then token by token."""
        best = Match()
        for blocks in reversed(range(len(hashes))):
            for kept in self._by_hash.get(hashes[blocks], ()):
                best = best.or_more(kept, tokens)
            if best.tokens >= blocks * BLOCK:
                break
        return best


@dataclass(frozen=True)
class Match:
    """A sequence that begins as a prompt does.

    Args:
        entry: the sequence; None: there is none.
        tokens: the prompt's first tokens that the sequence can give (SequenceKV.reach).
        shared: the most first tokens that any sequence has in common with the prompt.
    """

    entry: Kept | None = None
    tokens: int = 0
    shared: int = 0

    def or_more(self, entry: Kept, prompt: Tokens) -> Match:
        """The match with another sequence where that can give more tokens; this one elsewhere."""
        common = shared_tokens(entry, prompt)
        tokens, shared = entry.sequence.reach(common), max(common, self.shared)
        if tokens > self.tokens:
            return Match(entry, tokens, shared)
        return Match(self.entry, self.tokens, shared)


def shared_tokens(entry: Kept, tokens: Tokens) -> int:
    """First tokens that a kept sequence and a prompt have in common."""
    n = min(len(entry.tokens), len(tokens))
    different = np.flatnonzero(entry.tokens[:n] != tokens[:n])
    return int(different[0]) if len(different) else n
