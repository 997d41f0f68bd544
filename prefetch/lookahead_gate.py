"""Whether reading ahead pays: bytes hidden against bytes wasted, over a window of layers."""

from __future__ import annotations

from collections import deque


class Judge:
    """Turns the look-ahead off when it costs more than it saves, and tries it again now and then. Pure.

    A hidden byte saves its time on the disk. A wasted one takes as much, from a demand that may be waiting, and a
    place in the cache. Both grow alike with the level read ahead, so the level is not the judge's concern.

    After a window that did not pay it rests, as after one in which there was nothing to read; after a probe
    that did not pay either, twice as long. So the share of layers spent on probes goes from
    window / (window + rest) to window / (window + longest_rest).

    Args:
        window: layers that a verdict needs, and looks at.
        rest: layers until the first probe.
        longest_rest: layers between two probes at most.
        price: hidden bytes that make good for one wasted.
    """

    def __init__(
        self, *, window: int = 96, rest: int = 768, longest_rest: int = 12288, price: float = 1.0
    ) -> None:
        self._window, self._rest, self._longest, self._price = window, rest, longest_rest, price
        self._recent: deque[tuple[int, int]] = deque()
        self._hidden = self._wasted = 0
        self._next_rest = rest
        self._left = 0

    @property
    def on(self) -> bool:
        """Whether to read ahead now."""
        return not self._left

    def layer(self, hidden: int, wasted: int) -> None:
        """Tells what a layer's guesses came to, in bytes; both 0 where there was nothing to read."""
        if self._left:
            self._left -= 1
            return
        self._recent.append((hidden, wasted))
        self._hidden += hidden
        self._wasted += wasted
        if len(self._recent) < self._window:
            return
        idle = not self._hidden and not self._wasted
        if idle or self._wasted * self._price > self._hidden:
            self._left = self._rest if idle else self._next_rest
            self._next_rest = self._rest if idle else min(2 * self._next_rest, self._longest)
            self._recent.clear()
            self._hidden = self._wasted = 0
            return
        self._next_rest = self._rest
        hidden, wasted = self._recent.popleft()
        self._hidden -= hidden
        self._wasted -= wasted
