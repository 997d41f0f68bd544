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
        kept: all of them, the most recently used last.
    """

    def __init__(self) -> None:
        self.kept: list[Kept] = []
        self._by_hash = defaultdict[bytes, list[Kept]](list)

    def add(self, kept: Kept) -> None:
        """Adds a sequence, as the most recently used one."""
        self.kept.append(kept)
        for digest in kept.hashes:
            self._by_hash[digest].append(kept)

    def remove(self, kept: Kept) -> None:
        """Removes a sequence."""
        self.kept.remove(kept)
        for digest in kept.hashes:
            self._by_hash[digest].remove(kept)
            if not self._by_hash[digest]:
                del self._by_hash[digest]

    def use(self, kept: Kept) -> None:
        """Makes a sequence the most recently used one."""
        self.kept.remove(kept)
        self.kept.append(kept)

    def beginning_with(self, digest: bytes) -> list[Kept]:
        """The sequences of which a hash is `digest`."""
        return list(self._by_hash.get(digest, ()))

    def longest(self, wanted: Tokens, hashes: list[bytes]) -> tuple[Kept | None, int]:
        """Finds the sequence with most of the wanted first tokens, by hashes and then token by token.

        Returns:
            the sequence, None where there is none, and the number of tokens.
        """
        best, most = None, 0
        for blocks in reversed(range(len(hashes))):
            for kept in self._by_hash.get(hashes[blocks], ()):
                if (shared := shared_tokens(kept, wanted)) > most:
                    best, most = kept, shared
            if most >= blocks * BLOCK:
                break
        return best, most


def shared_tokens(kept: Kept, tokens: Tokens) -> int:
    """Tokens that a prompt can take of a kept sequence; all or none where linear attention has a later state only."""
    n = min(len(kept.tokens), len(tokens))
    different = np.flatnonzero(kept.tokens[:n] != tokens[:n])
    shared = int(different[0]) if len(different) else n
    return 0 if kept.sequence.states and shared < len(kept.tokens) else shared
