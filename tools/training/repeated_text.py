"""Measures how much of a held-out text the training text contains word for word: licences, tables, copied code."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STRETCH = 32
"""Tokens in a row that count as repeated text; fewer are a phrase."""

_BASE = np.uint64(0x9E3779B97F4A7C15)


def repeated_fraction(training: NDArray[np.uint16], held_out: NDArray[np.uint16]) -> float:
    """The fraction of held-out tokens in stretches of STRETCH tokens or more that the training text contains.

    Args:
        training: token ids uint16 [tokens].
        held_out: token ids uint16 [tokens], one or more.
    """
    seen = np.isin(_hashes(held_out), _hashes(training)).astype(np.int64)
    borders = np.zeros(len(held_out) + 1, np.int64)
    borders[: len(seen)] += seen
    borders[STRETCH : STRETCH + len(seen)] -= seen
    return float((borders.cumsum()[:-1] > 0).mean())


def _hashes(tokens: NDArray[np.uint16]) -> NDArray[np.uint64]:
    """Hashes every stretch by a polynomial modulo 2^64 -> uint64 [tokens - STRETCH + 1]; collisions are rare."""
    count = max(len(tokens) - STRETCH + 1, 0)
    out = np.zeros(count, np.uint64)
    for at in range(STRETCH):
        out *= _BASE
        out += tokens[at : at + count] + np.uint64(1)
    return out
