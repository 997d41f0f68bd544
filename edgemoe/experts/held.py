"""The planes that each tier has of every expert, as rules of levels read them."""

from __future__ import annotations

import numpy as np
import torch

from edgemoe.policy.tier_prices import HELD_LEVELS, place_of
from edgemoe.prefetch.base import PinnedExperts
from edgemoe.storage.base import Blocks, ExpertKey

_PLACES = {(own, slower): place_of(own, slower) for own in HELD_LEVELS for slower in HELD_LEVELS}
"""(level in the fastest tier, level in DRAM) -> place."""


class HeldExperts:
    """The place of every expert (policy.tier_prices.place_of), kept up by the tiers themselves.

    Args:
        pinned: the resident experts of the tiers.
        layers, experts: number of layers of the model, and of experts in a layer.

    Attributes:
        places: int64 [layers, experts]; changes whenever an expert arrives, changes its level or goes.
    """

    def __init__(self, pinned: PinnedExperts, layers: int, experts: int) -> None:
        self._fast, self._slow = np.zeros((2, layers, experts), np.int64)
        places = np.zeros((layers, experts), np.int64)
        self.places, self._places = torch.from_numpy(places), places
        pinned.observe(self._fastest)
        pinned.observe_slower(self._slower)

    def _fastest(self, key: ExpertKey, level: int, blocks: Blocks) -> None:
        self._fast[key] = level
        self._places[key] = _PLACES[level, self._slow[key]]

    def _slower(self, key: ExpertKey, level: int, blocks: Blocks) -> None:
        self._slow[key] = level
        self._places[key] = _PLACES[self._fast[key], level]
