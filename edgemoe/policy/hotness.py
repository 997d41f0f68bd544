"""How hot each expert is: the latest choices of routers (DynaExq, sections 3.3 and 3.5).

Two signals. `mass` is the moving average of gate weights, token by token (the first version's equation 2); `count`
counts an expert's tokens over an interval, and averages over intervals (the second version). Neither paper gives a
number: all defaults are ours.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgemoe.errors import UserError

Floats = npt.NDArray[np.float64]

SIGNALS = ("mass", "count")
"""Signals of an expert's heat: its gate weights, or the number of tokens that chose it."""


@dataclass(frozen=True)
class Hotness:
    """How the precision of experts follows their use: the settings of `--policy hotness`.

    Args:
        signal: one of SIGNALS.
        half_life: tokens after which a choice counts half, above 0.
        interval: tokens between two looks at which experts are hot, 1 or more; 0: see `seconds`.
        seconds: time between two looks, where `interval` is 0; above 0. Answers then depend on the machine's speed.
        margin: an expert enters the hot set of its layer if its score is above the coldest one's there by so
            much, as a fraction of the hot set's mean score; 0 or more.
        slack: ranks below the last place of a full hot set that a hot expert must have fallen before another one takes
            its place (DynaExq v2's rank slack); 0 or more.
        trend: intervals by which scores are extrapolated, by their change over the last one, before they are compared,
            so that experts about to be hot move early; 0 or more.
        warmup: tokens before the first choice, where no earlier run has left its heat; 0 or more.
        prompt_weight: weight of a prompt's token, where a new token's is 1; 0 or more.
        experts: most hot experts of a layer; None: as many as fit.
        rate: bytes per second that move in the background, above 0; None: as the disk gives.
        settled: steps wait at the end of an interval until its experts have moved: the same answers at any speed of a
            disk.

    Raises:
        UserError: one is out of its range.
    """

    signal: str = "mass"
    half_life: float = 64.0
    interval: int = 16
    seconds: float = 0.0
    margin: float = 0.1
    slack: int = 0
    trend: float = 0.0
    warmup: int = 16
    prompt_weight: float = 1.0
    experts: int | None = None
    rate: float | None = None
    settled: bool = False

    def __post_init__(self) -> None:
        if self.signal not in SIGNALS:
            raise UserError(f"--hotness {' or '.join(SIGNALS)}", repr(self.signal), "choose one of them")
        if not 0 < self.half_life < float("inf"):
            raise _wrong("tokens above 0 for --hot-half-life", self.half_life, "choose 64")
        if self.interval < 0 or (not self.interval and not 0 < self.seconds < float("inf")):
            found = f"{self.interval}t and {self.seconds:g}s"
            raise UserError("tokens or seconds above 0 for --hot-interval", found, "choose 16t or 2s")
        if not 0 <= self.margin < float("inf"):
            raise _wrong("a fraction of 0 or more for --hot-margin", self.margin, "choose 0.1")
        if self.slack < 0:
            raise _wrong("0 or more ranks for --hot-slack", self.slack, "choose 0")
        if not 0 <= self.trend < float("inf"):
            raise _wrong("intervals of 0 or more for --hot-trend", self.trend, "choose 0")
        if self.warmup < 0:
            raise _wrong("0 or more tokens for --hot-warmup", self.warmup, "choose 16")
        if not 0 <= self.prompt_weight < float("inf"):
            raise _wrong("a number of 0 or more for --hot-prompt-weight", self.prompt_weight, "choose 1")
        if self.experts is not None and self.experts < 0:
            raise _wrong("0 or more experts for --hot-experts", self.experts, "leave it out")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise _wrong("bytes per second above 0 for --migration-rate", self.rate, "choose 200MB")

    def __str__(self) -> str:
        """The text in tables: "hot mass", "hot count, 12 a layer"."""
        return f"hot {self.signal}" + ("" if self.experts is None else f", {self.experts} a layer")


def _wrong(expected: str, finding: float, action: str) -> UserError:
    return UserError(expected, f"{finding:g}", action)


class Scores(ABC):
    """The heat of every expert, from what routers chose.

    Attributes:
        values: float64 [layers, experts], 0 or more; only values of one layer compare.
    """

    def __init__(self, layers: int, experts: int, half_life: float) -> None:
        self.values: Floats = np.zeros((layers, experts))
        self._half_life = half_life

    @abstractmethod
    def observe(self, counts: Floats, mass: Floats, tokens: float) -> None:
        """Takes a step's choices: tokens [layers, experts] that chose each expert, the sums [layers, experts] of their
        gate weights, and the step's tokens, all weighted alike."""

    @abstractmethod
    def close_interval(self, tokens: float) -> None:
        """Ends an interval of so many weighted tokens."""

    @abstractmethod
    def seed(self, heat: Floats, slots: int) -> None:
        """Starts from the heat [layers, experts] of an earlier run, as if it had been long observed.

        Args:
            heat: 0 to 1; a layer without any stays at 0.
            slots: experts of a token.
        """

    def _kept(self, tokens: float) -> float:
        return float(2 ** (-tokens / self._half_life))


class GateMass(Scores):
    """S <- a S + (1 - a) g for each token, g its gate weight of the expert or 0 (DynaExq v1, equation 2).

    The tokens of one step count as one after another whose order does not matter: they are averaged.

    >>> scores = GateMass(layers=1, experts=2, half_life=1)
    >>> scores.observe(np.array([[1, 0]]), np.array([[0.5, 0.0]]), tokens=1)
    >>> scores.observe(np.array([[0, 0]]), np.array([[0.0, 0.0]]), tokens=1)
    >>> scores.values.tolist()
    [[0.125, 0.0]]
    """

    def observe(self, counts: Floats, mass: Floats, tokens: float) -> None:
        """Takes a step's choices into the average at once."""
        kept = self._kept(tokens)
        self.values *= kept
        self.values += mass * ((1 - kept) / tokens)

    def close_interval(self, tokens: float) -> None:
        """Nothing: an average has no intervals."""

    def seed(self, heat: Floats, slots: int) -> None:
        """Sets the average to heat scaled to gate weights that add up to 1."""
        self.values = heat / np.maximum(heat.sum(1, keepdims=True), 1e-30)


class TokenCounts(Scores):
    """h <- a h + (1 - a) c at the end of an interval, c the tokens that chose the expert (DynaExq v2, 3.5).

    >>> scores = TokenCounts(layers=1, experts=2, half_life=2)
    >>> scores.observe(np.array([[2, 1]]), np.array([[0.7, 0.3]]), tokens=2)
    >>> scores.close_interval(2)
    >>> scores.values.tolist()
    [[0.5, 0.25]]
    """

    def __init__(self, layers: int, experts: int, half_life: float) -> None:
        super().__init__(layers, experts, half_life)
        self._counts: Floats = np.zeros((layers, experts))

    def observe(self, counts: Floats, mass: Floats, tokens: float) -> None:
        """Adds a step's choices to the interval's counts."""
        self._counts += counts

    def close_interval(self, tokens: float) -> None:
        """Averages; counts a token, so that intervals of different lengths compare."""
        kept = self._kept(tokens)
        self.values *= kept
        self.values += self._counts * ((1 - kept) / tokens)
        self._counts[:] = 0

    def seed(self, heat: Floats, slots: int) -> None:
        """Sets the average to heat scaled to tokens with `slots` experts each."""
        self.values = slots * heat / np.maximum(heat.sum(1, keepdims=True), 1e-30)


class Trend:
    """Expected scores a little later, by their change over the last interval.

    >>> trend = Trend(np.array([[0.2, 0.4]]))
    >>> trend.close_interval(np.array([[0.3, 0.1]]))
    >>> trend.ahead(np.array([[0.3, 0.1]]), intervals=1).round(2).tolist()
    [[0.4, 0.0]]
    """

    def __init__(self, scores: Floats) -> None:
        self._before, self._change = scores.copy(), np.zeros_like(scores)

    def close_interval(self, scores: Floats) -> None:
        """Takes the scores [layers, experts] at the end of an interval."""
        self._change = scores - self._before
        self._before = scores.copy()

    def ahead(self, scores: Floats, intervals: float) -> Floats:
        """Extrapolates scores [layers, experts] by so many intervals; none falls below 0."""
        return np.maximum(scores + intervals * self._change, 0)


def scores_of(settings: Hotness, layers: int, experts: int) -> Scores:
    """The scores of a setting's signal, all 0."""
    kind = GateMass if settings.signal == "mass" else TokenCounts
    return kind(layers, experts, settings.half_life)
