"""Prices of levels where some of an expert's planes are in memory: the seconds of the missing planes (0036).

A bit from the slowest tier costs the price of a bit. A bit from DRAM costs the fraction of it that its transfer takes
relative to a read from disk. A bit in the fastest tier costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from edgemoe.policy.bits import BITS_PER_WEIGHT

HELD_LEVELS = (0, 2, 4, 8)
"""Levels that a tier can have of an expert; 0: nothing of it."""

PLACES = len(HELD_LEVELS) ** 2
"""Rows of a table of prices, as in csrc/levels.h: pairs of an expert's levels in the fastest tier and in any."""


def place_of(own: int, slower: int) -> int:
    """The row of an expert with level `own` in the fastest tier and `slower` in DRAM; row 0: it is in neither.

    >>> place_of(0, 0), place_of(2, 0), place_of(2, 8), place_of(8, 4)
    (0, 5, 7, 15)
    """
    return HELD_LEVELS.index(own) * len(HELD_LEVELS) + HELD_LEVELS.index(max(own, slower))


@dataclass(frozen=True, eq=False)
class TierPrices:
    """The present places of all experts' planes, and their costs from there.

    Args:
        places: int64 [layers, experts], the row of each expert (place_of). It changes while the model runs.
        dram: seconds of a bit from DRAM, as a fraction of a bit's from the slowest tier; 0 to 1.
        whole: a level is read whole, whatever of it is in memory (settings.PROMOTIONS).
    """

    places: torch.Tensor
    dram: float = 1.0
    whole: bool = False

    def paid_bits(self, levels: tuple[int, ...]) -> torch.Tensor:
        """The bits that each level is charged for at each place: float32 [PLACES, levels].

        >>> prices = TierPrices(torch.zeros(1, 1, dtype=torch.int64), dram=0.5)
        >>> [prices.paid_bits((4, 2, 0))[place_of(*held)].tolist() for held in ((0, 0), (2, 0), (0, 2), (2, 4))]
        [[4.5, 2.5, 0.0], [2.0, 0.0, 0.0], [3.25, 1.25, 0.0], [1.0, 0.0, 0.0]]
        """
        return torch.tensor(
            [
                [self._paid(level, own, max(own, slower)) for level in levels]
                for own in HELD_LEVELS
                for slower in HELD_LEVELS
            ]
        )

    def _paid(self, level: int, own: int, anywhere: int) -> float:
        fastest, memory = self._present(level, own), self._present(level, anywhere)
        return BITS_PER_WEIGHT[level] - memory + self.dram * (memory - fastest)

    def _present(self, level: int, place: int) -> float:
        """The bits of a level that are there where `place` is."""
        return BITS_PER_WEIGHT[0 if self.whole and place < level else min(place, level)]
