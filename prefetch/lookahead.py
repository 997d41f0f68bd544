"""What the predictions of all steps share: the mode of look-ahead, its gate, and which of them have transfers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from edgemoe.prefetch.base import MODES
from edgemoe.prefetch.counts import TransferCounts
from edgemoe.prefetch.lookahead_gate import LookaheadGate


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
        predictions: one for each step that has begun and not ended.
    """

    def __init__(self, gate: LookaheadGate) -> None:
        self.mode, self.gate = "off", gate
        self.predictions: list[Prediction] = []

    def configure(self, mode: str) -> None:
        """Sets the mode of the predictions that follow.

        Raises:
            ValueError: there is no such mode.
        """
        if mode not in MODES:
            raise ValueError(f"expected a look-ahead mode of {', '.join(MODES)}, got {mode!r}")
        self.mode = mode

    @property
    def on(self) -> bool:
        """Whether predictions are taken."""
        return self.mode != "off" and (self.mode != "auto" or self.gate.on)

    def yield_blocks(self, own: Prediction) -> bool:
        """Frees blocks of one expert for a demand of the step whose prediction is `own`: of this one first.

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
        """Tells the gate what the predictions of some layers of a step came to; counts its rests and its verdicts.

        Args:
            counts: the counters of the step.
            hidden, wasted: bytes, as in LookaheadGate.layer.
            layers: how many had the same.
        """
        if self.mode != "auto":
            return
        was_on = self.gate.on
        counts.auto_resting += 0 if was_on else layers
        self.gate.layer(hidden, wasted, layers)
        counts.auto_off += was_on and not self.gate.on
