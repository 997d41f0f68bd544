"""The choice of experts that move from the host's memory, where a device reads them, into its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgemoe.storage.base import ExpertKey

HALF_LIFE = 128
"""Tokens after which a use counts half."""

MARGIN = 1.25
"""How many times hotter than the coldest resident expert one must be, so that two equal ones do not take turns."""

MOST = 16
"""Experts moved a token. Their copies take the link for a tenth of the time of a token that reads as many in place."""


class Promotions:
    """Counts the uses of every expert, later ones more, and compares experts by them.

    >>> promotions = Promotions(layers=1, experts=3)
    >>> promotions.note([0], np.array([[1, 2]]))
    >>> promotions.note([0], np.array([[2]]))
    >>> promotions.choose([(ExpertKey(0, 2), 4)], np.array([[0, 4, 0]]))
    {ExpertKey(layer=0, expert=2): 4}

    Args:
        layers, experts: number of layers of the model, and of experts in a layer.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._heat: NDArray[np.float32] = np.zeros((layers, experts), np.float32)
        self._decay = np.float32(0.5 ** (1 / HALF_LIFE))

    def note(self, layers: Sequence[int], choice: NDArray[np.int64]) -> None:
        """Counts the experts [layers, k] that a token used in some layers, none of them twice."""
        rows = np.asarray(layers)
        self._heat[rows] *= self._decay
        self._heat[rows[:, None], choice] += 1

    def choose(
        self, away: Sequence[tuple[ExpertKey, int]], levels: NDArray[np.int64]
    ) -> dict[ExpertKey, int]:
        """Chooses experts to move, at most MOST, the hottest first: each is MARGIN times hotter than a resident one.

        Args:
            away: experts, and the level at which each was used and is not resident.
            levels: int64 [layers, experts], of the resident experts; 0: not resident.
        """
        chosen: dict[ExpertKey, int] = {}
        hottest = sorted(away, key=lambda one: -self._heat[one[0].layer, one[0].expert])[:MOST]
        if not hottest:
            return chosen
        resident = self._heat[levels >= min(level for _, level in hottest)]
        if len(resident) > MOST:
            resident = np.partition(resident, MOST)[:MOST]
        for (key, level), coldest in zip(hottest, [*np.sort(resident), *[0.0] * MOST], strict=False):
            if self._heat[key.layer, key.expert] > MARGIN * coldest:
                chosen[key] = level
        return chosen
