"""The tokens whose keys and values layers with a window keep (docs/decisions/0057)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgemoe.kv import blocks

SLACK = 64
"""Tokens by which a sequence can always be cropped, once, although some of its layers keep their window alone."""


def kept_before(window: int, end: int) -> int:
    """Returns the first token that stays for a window that ends at token `end`, or up to SLACK tokens before.

    Blocks stay whole, so that they can be written to disk.

    >>> kept_before(128, 100), kept_before(128, 900), kept_before(128, 1000)
    (0, 512, 512)
    """
    size = blocks.BLOCK
    return max(((end - SLACK) // size * size - window) // size * size, 0)


def most_tokens(window: int) -> int:
    """Returns the most tokens that a layer with a window has in memory at once.

    They are three windows with their slack, and the block of rows that is computed. In a prompt's step the windows lie
    before the shared mark, before the step and before its rows; in an answer before both marks and the last token.
    """
    size = blocks.BLOCK
    return 3 * (-(-window // size) * size + size + SLACK) + blocks.BLOCK_ROWS


class Windows:
    """The tokens of one sequence that its layers with a window keep.

    They are the window before the last valid token, and the windows before two marks, to which the sequence can be
    cropped later: where other requests went on in another way, and the end of the prompt.

    Args:
        window: tokens of the longest window.
        drops: whether tokens outside of these windows go; False: the context is too short to be worth it.

    Attributes:
        ranges: ascending ranges of tokens; the last one ends with the last valid token.
    """

    def __init__(self, window: int, *, drops: bool) -> None:
        self._window, self._drops = window, drops
        self.ranges = [range(0)]
        self._marks: tuple[int, ...] = (0, 0)
        self._due = self._written = 0

    def reach(self, length: int) -> int:
        """Returns the most tokens, at most `length`, that the sequence can be cropped to."""
        ends = [min(length, each.stop) for each in self.ranges if self._serves(each, min(length, each.stop))]
        return max(ends, default=0)

    def _serves(self, tokens: range, end: int) -> bool:
        """Whether a range has the window before token `end`, or all tokens before it."""
        return tokens.start + (self._window if tokens.start else 0) <= end

    def mark(self, shared: int | None, prompt: int) -> list[range]:
        """Sets the marks, before the sequence has their tokens or while these are kept.

        Args:
            shared: tokens that the sequence has in common with others; None: as before.
            prompt: number of tokens of the whole prompt.

        Returns:
            the tokens that are not kept any more.
        """
        self._marks = self._marks[0] if shared is None else shared, prompt
        return self._trim()

    def commit(self, length: int) -> list[range]:
        """Makes the tokens of a step valid; returns the tokens that are not kept any more."""
        self._written, last = 0, self.ranges[-1]
        self.ranges[-1] = range(last.start, length)
        return self._trim() if length >= self._due else []

    def _trim(self) -> list[range]:
        """Leaves the windows; returns all other tokens."""
        length, size, before = self.ranges[-1].stop, blocks.BLOCK, self.ranges
        self._due = (length - SLACK) // size * size + size + SLACK
        if not self._drops:
            return []
        self.ranges = _common(before, self._wanted(length)) or [range(length, length)]
        return _without(before, self.ranges)

    def _wanted(self, end: int) -> list[range]:
        """The tokens to keep of a sequence that ends at `end`, ascending and without a gap in a range."""
        found = list[range]()
        for mark in sorted({*(mark for mark in self._marks if 0 < mark < end), end}):
            first = kept_before(self._window, mark)
            if found and first <= found[-1].stop:
                first = found.pop().start
            found.append(range(first, mark))
        return found

    def passed(self, at: int, rows: int) -> list[range]:
        """Returns the tokens of a step that no further row of a layer sees, and that are not kept.

        Args:
            at: the first token of the rows that the layer computes now, after earlier rows of the step.
            rows: number of tokens.
        """
        valid = self.ranges[-1].stop
        self.write(at + rows)
        end = kept_before(self._window, at)
        first = max(valid, kept_before(self._window, at - blocks.BLOCK_ROWS))
        if not self._drops or first >= end:
            return []
        return _without([range(first, end)], self._wanted(at))

    def write(self, end: int) -> None:
        """Notes that a step writes tokens up to `end`, which go if it fails."""
        self._written = max(self._written, end)

    def failed(self) -> list[range]:
        """Returns the tokens that a failed step wrote."""
        valid, written = self.ranges[-1].stop, self._written
        self._written = 0
        return [range(valid, written)] if valid < written else []

    def crop(self, length: int) -> list[range]:
        """Drops the tokens from `length` on, a number from `reach`; returns the tokens whose memory is freed."""
        before = self.ranges
        self.ranges = _common(before, [range(length)]) or [range(0)]
        self._marks = tuple(mark if mark <= length else 0 for mark in self._marks)
        self._due = 0
        return _without(before, self.ranges) if self._drops else []

    def copy(self, other: Windows, length: int) -> None:
        """Takes over the ranges that another sequence keeps of its first `length` tokens."""
        self.ranges = _common(other.ranges, [range(length)]) or [range(0)]
        self._marks, self._due = tuple(mark if mark <= length else 0 for mark in other._marks), 0

    def restore(self, tokens: range) -> None:
        """Adds tokens that come from outside, after all others."""
        last = self.ranges[-1]
        if tokens.start <= last.stop:
            self.ranges[-1] = range(last.start, tokens.stop)
        else:
            self.ranges.append(tokens)
        self._due = 0

    def whole_blocks(self) -> frozenset[int]:
        """Returns the numbers of the blocks of which all tokens are kept."""
        size = blocks.BLOCK
        return frozenset(
            block for each in self.ranges for block in range(-(-each.start // size), each.stop // size)
        )


def _common(some: Sequence[range], others: Iterable[range]) -> list[range]:
    """The tokens that are in both of two lists of ranges, ascending."""
    found = (range(max(a.start, b.start), min(a.stop, b.stop)) for b in others for a in some)
    return sorted((each for each in found if each), key=lambda each: each.start)


def _without(some: Iterable[range], others: Sequence[range]) -> list[range]:
    """The tokens of some ranges that are in no other one."""
    found = list[range]()
    for each in some:
        start = each.start
        for other in others:
            if other.start < each.stop and other.stop > start:
                found.append(range(start, other.start))
                start = max(start, other.stop)
        found.append(range(start, each.stop))
    return [each for each in found if each]
