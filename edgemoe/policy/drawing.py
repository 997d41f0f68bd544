"""The draw of the next token from its scores, in integers: a GPU and a CPU draw the same token of the same scores.

A token's weight is 2**40 times its probability as a fraction of the likeliest token's, rounded down. So sums of weights
have no rounding and do not depend on an order. The tokens stand in the order of their scores, equal ones by their ids.
A random number points at a place in the sum of all weights that are left, and the token there is drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

FRACTION = 16
"""Bits after the point of a distance in powers of two."""

HIGHEST = 40
"""Bits of the likeliest token's weight. A token that is less likely by as many powers of two is never drawn."""

UNIT = 31
"""Bits of a random number, and of a probability."""

FARTHEST = 1e9
"""The largest difference between two scores: its product with a scale is finite."""

LONGEST = float((HIGHEST + 1) << FRACTION)
"""The largest distance; its weight is 0."""

_TURN = 60 - HIGHEST
"""Bits by which a product of two powers, of 30 bits each, exceeds a weight."""


def powers() -> NDArray[np.int64]:
    """2**30 times 2 to the power of -i / 2**8, and of -i / 2**16, for i below 256; int64 [2, 256].

    >>> powers()[:, 0].tolist() == [1 << 30, 1 << 30], int(powers()[0, 128])
    (True, 759250125)
    """
    exponents = np.arange(256) / np.array([[1 << 8], [1 << 16]])
    integers: NDArray[np.int64] = np.rint(np.exp2(30 - exponents)).astype(np.int64)
    return integers


_COARSE, _FINE = powers()


@dataclass(frozen=True)
class DrawRule:
    """How tokens are drawn from scores.

    Args:
        scale: distance in powers of two, in units of 2**-FRACTION, for a difference of 1 between two scores; float32.
        top_k: largest number of tokens that are left, and tokens with the score of the last one; 0: all are.
        mass: probability of the tokens that are left, the likeliest first, in units of 2**-UNIT.
        least: least weight of a token that is left.
    """

    scale: float
    top_k: int = 0
    mass: int = 1 << UNIT
    least: int = 0

    @classmethod
    def of(cls, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> DrawRule:
        """The rule of settings as engine.sampling.Sampling has them; the temperature is no less than COLD."""
        scale = float(np.float32((1 << FRACTION) / math.log(2) / temperature))
        return cls(scale, top_k, round(top_p * (1 << UNIT)), math.ceil(min_p * (1 << HIGHEST)))

    def weights(self, distances: NDArray[np.float32]) -> NDArray[np.int64]:
        """The weights of tokens, by how much their scores are below the largest one; int64, as the distances' shape.

        >>> DrawRule.of(1.0).weights(np.float32([0, math.log(2), math.inf])).tolist()[::2]
        [1099511627776, 0]
        """
        below = np.minimum(distances, np.float32(FARTHEST))
        steps = np.minimum(below * np.float32(self.scale), np.float32(LONGEST)).astype(np.int32)
        weights: NDArray[np.int64] = _COARSE[steps >> 8 & 255] * _FINE[steps & 255]
        weights >>= (steps >> FRACTION).astype(np.int64) + _TURN
        return weights

    def draw(self, scores: torch.Tensor, number: int) -> int:
        """Draws a token.

        Args:
            scores: float32 [vocab], of which one is finite and none is NaN or positive infinity.
            number: a random number below 2**UNIT.
        """
        numbers = scores.numpy()
        likely = numbers
        if 0 < self.top_k < len(numbers):
            likely = numbers[numbers >= np.partition(numbers, -self.top_k)[-self.top_k]]
        negative, counts = np.unique(-likely, return_counts=True)
        weights = self.weights(negative - negative[0])
        sums = (weights * counts).cumsum()
        left = self._left(weights, sums)
        pointed = min(left, int(sums[weights >= self.least][-1])) * number >> UNIT
        at = int(np.searchsorted(sums, pointed, side="right"))
        earlier = (pointed - (int(sums[at - 1]) if at else 0)) // int(weights[at])
        return int(np.flatnonzero(numbers == -negative[at])[earlier])

    def _left(self, weights: NDArray[np.int64], sums: NDArray[np.int64]) -> int:
        """The sum of the weights of the likeliest tokens that have the probability `mass` together.

        Args:
            weights, sums: the weight of each score, the largest one first, and sums of weights of tokens up to it.
        """
        bound = max(-(-int(sums[-1]) * self.mass >> UNIT), 1)
        at = int(np.searchsorted(sums, bound))
        before, weight = int(sums[at - 1]) if at else 0, int(weights[at])
        return before - (before - bound) // weight * weight


class Draws:
    """The random numbers of one conversation, and the rule by which they become tokens.

    Args:
        rule: the rule; None: the likeliest token comes, and no number is taken.
        seed: seed of the random generator.

    Attributes:
        number: how many numbers have been taken.
    """

    _BLOCK = 64

    def __init__(self, rule: DrawRule | None, seed: int) -> None:
        self.rule, self.number = rule, 0
        self._generator = torch.Generator().manual_seed(seed)
        self._coming = np.empty(0, np.int64)

    def next(self) -> int:
        """Takes the next number, which is below 2**UNIT."""
        number = int(self.coming(1)[0])
        self._coming, self.number = self._coming[1:], self.number + 1
        return number

    def coming(self, count: int) -> NDArray[np.int64]:
        """The next numbers, which are not taken; int64 [count]."""
        while len(self._coming) < count:
            more = torch.randint(1 << UNIT, (self._BLOCK,), generator=self._generator).numpy()
            self._coming = np.concatenate((self._coming, more))
        return self._coming[:count]

    def changed(self, rule: DrawRule | None) -> Draws:
        """Goes on with another rule, from the same random state."""
        other = Draws(rule, 0)
        other._generator.set_state(self._generator.get_state())
        other._coming = self._coming
        return other
