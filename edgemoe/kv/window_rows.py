"""Rows of the tokens that a layer with a window keeps, in RAM and on a device (docs/decisions/0057)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from edgemoe.kv.formats import TILE
from edgemoe.machine.pages import return_pages


class PlacedRows:
    """Rows of a layer in memory for the whole context, in RAM: the row of a token is its number.

    Args:
        stored: the layer's tensors of keys and values, each [heads, context, W].
    """

    moved = 0

    def __init__(self, stored: Sequence[torch.Tensor]) -> None:
        self._stored = stored

    def row(self, tokens: range) -> int:
        """Returns the row of the first of some tokens; the others follow it."""
        return tokens.start

    def add(self, tokens: range) -> None:
        """Does nothing: every token has its row."""

    def hold(self, tokens: Sequence[range]) -> None:
        """Does nothing: every token has its row."""

    def drop(self, tokens: range) -> None:
        """Returns the pages of some tokens to the system."""
        for stored in self._stored:
            row = stored.shape[-1] * stored.itemsize
            for head in stored:
                return_pages(head, tokens.start * row, tokens.stop * row)


class MovedRows:
    """Rows of a layer in memory for fewer tokens than the context, as on a device, next to each other and ascending.

    Where tokens are dropped, the rows after them move towards the front, by a multiple of TILE: a kernel that takes
    rows by tiles has the same tiles as in memory for all tokens, and computes the same bits.

    Args:
        stored: the layer's tensors of keys and values, each [heads, rows, W].

    Attributes:
        held: ascending ranges of the tokens that have rows; a gap lies between two of them.
    """

    def __init__(self, stored: Sequence[torch.Tensor]) -> None:
        self._stored = stored
        self.held = list[range]()
        self._first = list[int]()
        """The row of the first token of each range."""

    @property
    def moved(self) -> int:
        """The difference between a token's number and its row, for the tokens of the last range."""
        return self.held[-1].start - self._first[-1] if self.held else 0

    def row(self, tokens: range) -> int:
        """Returns the row of the first of some tokens; the others follow it.

        Args:
            tokens: all of them have rows in one range.
        """
        for held, first in zip(self.held, self._first, strict=True):
            if held.start <= tokens.start and tokens.stop <= held.stop:
                return first + tokens.start - held.start
        raise AssertionError(f"no rows of tokens {tokens.start} to {tokens.stop}")

    def add(self, tokens: range) -> None:
        """Gives rows to tokens that will be written, after all others; tokens that have rows keep them."""
        if not self.held or tokens.start > self.held[-1].stop:
            self.hold([*self.held, tokens])
        elif tokens.stop > self.held[-1].stop:
            self.held[-1] = range(self.held[-1].start, tokens.stop)
        last = self._first[-1] + len(self.held[-1])
        assert last <= self._stored[0].shape[1], "more tokens than a layer with a window has memory for"

    def hold(self, tokens: Sequence[range]) -> None:
        """Gives rows to ascending ranges of tokens, and to no others. No row moves; their old contents are lost."""
        self.held, self._first = list(tokens), _first_rows(tokens)

    def drop(self, tokens: range) -> None:
        """Takes the rows of some tokens away, and moves the rows of the tokens after them."""
        left = [
            part
            for each in self.held
            for part in (
                range(each.start, min(each.stop, tokens.start)),
                range(max(each.start, tokens.stop), each.stop),
            )
            if part
        ]
        if left == self.held:
            return
        for each, to in zip(left, _first_rows(left), strict=True):
            self._move(self.row(each), to, len(each))
        self.hold(left)

    def _move(self, first: int, to: int, rows: int) -> None:
        """Moves rows towards the front, so many at a time that no copy writes what it reads."""
        by = first - to
        if not by:
            return
        for stored in self._stored:
            for at in range(0, rows, by):
                end = min(at + by, rows)
                stored[:, to + at : to + end] = stored[:, first + at : first + end]


def most_rows(tokens: int) -> int:
    """Returns the rows that up to three ranges of so many tokens in all take."""
    return tokens + 3 * (TILE - 1)


def _first_rows(ranges: Sequence[range]) -> list[int]:
    """The rows of the first tokens of ascending ranges: the next free row with the token's place in a tile."""
    first, end = list[int](), 0
    for each in ranges:
        first.append(end + (each.start - end) % TILE)
        end = first[-1] + len(each)
    return first
