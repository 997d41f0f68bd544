"""A target time per token: finds the bits per weight that meet it on this machine, under this limit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from edgemoe.policy.bits import BITS_PER_WEIGHT
from edgemoe.policy.settings import RunSettings

FIRST_INTERVAL, LONGEST_INTERVAL = 4, 32
"""Tokens between two changes: at the start, and where the target is met."""

CLOSE = 0.04
"""Relative difference of an interval's mean time from the target that changes nothing."""

_ABOVE_LOWEST = 0.01
"""Bits above the lowest level's: fewer cannot be a mean of several levels."""

_MISS, _MISSES = 0.1, 6
"""Relative difference of an interval at the fewest bits that misses the target, and how many such intervals show it."""

_GAIN = 2.0
"""Bits by which a relative difference of 1 changes the bits at first."""

_GAINS = 0.5, 8.0
_LARGEST_STEP = 1.5
"""Bits of one change."""


@dataclass
class BitsController:
    """Adjusts bits per weight until a token takes the target time.

    After every interval of tokens the bits change by the relative difference of the interval's mean time from the
    target, times a gain. A difference that changes its sign halves the gain, so that the bits settle; one that keeps
    it for two intervals raises the gain again. Intervals grow while the target is met.

    >>> controller = BitsController(0.05, 4.5, (2.5, 8.5))
    >>> for _ in range(48):
    ...     controller.observe(0.01 + 0.02 * controller.bits)
    >>> 0.045 < 0.01 + 0.02 * controller.bits < 0.055
    True

    Args:
        target: seconds.
        bits: the first bits.
        range: fewest and most bits.

    Attributes:
        changes: how often the bits have changed.
        least: mean seconds of a token at the fewest bits, once enough tokens there have missed the target; else None.
    """

    target: float
    bits: float
    range: tuple[float, float]
    changes: int = 0
    least: float | None = None
    _times: list[float] = field(default_factory=list)
    _interval: int = FIRST_INTERVAL
    _gain: float = _GAIN
    _last: float = 0.0
    _same: int = 0
    _missed: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, settings: RunSettings) -> BitsController | None:
        """Makes one for the settings of new tokens; None: they want no time per token."""
        if settings.tpot_target is None:
            return None
        lowest = min(level for level in settings.levels if level)
        fewest = BITS_PER_WEIGHT[lowest] + (0 if 0 in settings.levels else _ABOVE_LOWEST)
        most = BITS_PER_WEIGHT[settings.levels[0]]
        return cls(settings.tpot_target, max(settings.mean_bits, fewest), (fewest, most))

    def observe(self, seconds: float) -> None:
        """Takes the time of one token, and changes the bits at the end of an interval."""
        self._times.append(seconds)
        if len(self._times) < self._interval:
            return
        mean = math.fsum(self._times) / len(self._times)
        self._times.clear()
        difference = mean / self.target - 1
        if abs(difference) <= CLOSE:
            self._interval = min(2 * self._interval, LONGEST_INTERVAL)
            return
        if abs(difference) > 0.1:
            self._interval = FIRST_INTERVAL
        self._adapt(difference)
        step = max(-_LARGEST_STEP, min(-difference * self._gain, _LARGEST_STEP))
        wanted = max(self.range[0], min(self.bits + step, self.range[1]))
        if wanted == self.bits:
            if difference > _MISS and wanted == self.range[0]:
                self._missed.append(mean)
            if len(self._missed) == _MISSES:
                self.least = math.fsum(self._missed) / _MISSES
            return
        self.bits, self.changes = wanted, self.changes + 1
        self._missed.clear()

    def _adapt(self, difference: float) -> None:
        """Halves the gain where the difference changes its sign, and raises it where it keeps it."""
        if difference * self._last < 0:
            self._gain, self._same = max(self._gain / 2, _GAINS[0]), 0
        else:
            self._same += 1
            if self._same > 2:
                self._gain = min(self._gain * 1.5, _GAINS[1])
        self._last = difference
