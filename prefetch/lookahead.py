"""State that the predictions of all steps share: the mode of look-ahead, its gate, and the list of predictions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from edgemoe.prefetch.base import MODES
from edgemoe.prefetch.counts import TransferCounts


class LookaheadGate:
    """Turns the look-ahead off when it costs more than it saves, and tries it again now and then. Pure.

    A hidden byte saves its time on the disk. A wasted byte takes as much time, from a demand that may be waiting, and a
    place in the cache. Both grow alike with the level that is read ahead.

    After a window that did not pay, or in which there was nothing to read, the gate rests; after a probe that did not
    pay either it rests twice as long. So the fraction of layers spent on probes goes from window / (window + rest) to
    window / (window + longest_rest).

    Args:
        window: layers that a verdict looks at.
        rest: layers until the first probe.
        longest_rest: most layers between two probes.
        price: hidden bytes that outweigh a wasted one.
    """

    def __init__(
        self, *, window: int = 96, rest: int = 768, longest_rest: int = 12288, price: float = 1.0
    ) -> None:
        self._window, self._rest, self._longest, self._price = window, rest, longest_rest, price
        self._recent: deque[tuple[int, int]] = deque()
        self._hidden = self._wasted = 0
        self._next_rest = rest
        self.resting = 0
        """Layers until the next probe; 0 while it is on."""
        self.on = True
        """Whether to read ahead now."""

    def layer(self, hidden: int, wasted: int, layers: int = 1) -> None:
        """Takes the hidden and the wasted bytes of a layer's predictions; both 0 where there was nothing to read.

        Args:
            hidden, wasted: bytes of each layer.
            layers: number of layers with these bytes; more than one during a rest alone, and at most `resting`.
        """
        if self.resting:
            self.resting -= layers
            self.on = not self.resting
            return
        self._recent.append((hidden, wasted))
        self._hidden += hidden
        self._wasted += wasted
        if len(self._recent) >= self._window:
            self._judge()

    def _judge(self) -> None:
        """Drops the oldest layer of a full window, or begins a rest."""
        idle = not self._hidden and not self._wasted
        if idle or self._wasted * self._price > self._hidden:
            self.resting, self.on = self._rest if idle else self._next_rest, False
            self._next_rest = self._rest if idle else min(2 * self._next_rest, self._longest)
            self._recent.clear()
            self._hidden = self._wasted = 0
            return
        self._next_rest = self._rest
        hidden, wasted = self._recent.popleft()
        self._hidden -= hidden
        self._wasted -= wasted


class Prediction(Protocol):
    """A step's prediction, as far as other steps need it."""

    def yield_blocks(self) -> bool:
        """Frees the blocks of one expert for a demand. Returns False where there are none to free."""

    def end(self) -> None:
        """Ends every transfer and lease."""


class Lookahead:
    """The mode and the gate of look-ahead, and the predictions of the steps that have begun. For the engine's thread.

    Args:
        gate: decides in mode `auto`.

    Attributes:
        mode: one of base.MODES; `configure` sets it.
        on: whether predictions are taken.
        predictions: one for each step that has begun and not ended.
    """

    def __init__(self, gate: LookaheadGate) -> None:
        self.mode, self.gate, self.on = "off", gate, False
        self.predictions: list[Prediction] = []

    def configure(self, mode: str) -> None:
        """Sets the mode of the predictions that follow.

        Raises:
            ValueError: there is no such mode.
        """
        if mode not in MODES:
            raise ValueError(f"expected a look-ahead mode of {', '.join(MODES)}, got {mode!r}")
        self.mode, self.on = mode, mode != "off" and (mode != "auto" or self.gate.on)

    def yield_blocks(self, own: Prediction) -> bool:
        """Frees blocks of one expert for a demand of the step whose prediction is `own`; takes `own`'s blocks first.

        Returns:
            whether there were any.
        """
        others: Iterable[Prediction] = (each for each in self.predictions if each is not own)
        return own.yield_blocks() or any(each.yield_blocks() for each in others)

    def end(self) -> None:
        """Ends every transfer and lease of every step's prediction."""
        for prediction in self.predictions:
            prediction.end()

    def judge(self, counts: TransferCounts, hidden: int, wasted: int, layers: int = 1) -> None:
        """Gives the gate the bytes of some layers' predictions in a step; counts its rests and its verdicts.

        In mode `auto` alone.

        Args:
            counts: the counters of the step.
            hidden, wasted: bytes, see LookaheadGate.layer.
            layers: number of layers with these bytes.
        """
        was_on = self.on
        counts.auto_resting += 0 if was_on else layers
        self.gate.layer(hidden, wasted, layers)
        self.on = self.gate.on
        counts.auto_off += was_on and not self.on
