"""Which planes of every expert each tier has, as rules of levels read it."""

from __future__ import annotations

import numpy as np
import torch

from edgemoe.policy.tier_prices import place_of
from edgemoe.prefetch.base import PinnedExperts
from edgemoe.storage.base import Blocks, ExpertKey


class HeldExperts:
    """The place of every expert (policy.tier_prices.place_of), kept up by the tiers themselves.

    Args:
        pinned: of the tiers.
        layers, experts: of the model, and in a layer.

    Attributes:
        places: int64 [layers, experts]; changes whenever an expert arrives, changes its level or goes.
    """

    def __init__(self, pinned: PinnedExperts, layers: int, experts: int) -> None:
        self._levels = np.zeros((2, layers, experts), np.int64)
        places = np.zeros((layers, experts), np.int64)
        self.places, self._places = torch.from_numpy(places), places
        pinned.observe(self._fastest)
        pinned.observe_slower(self._slower)

    def _fastest(self, key: ExpertKey, level: int, blocks: Blocks) -> None:
        self._changed(0, key, level)

    def _slower(self, key: ExpertKey, level: int, blocks: Blocks) -> None:
        self._changed(1, key, level)

    def _changed(self, tier: int, key: ExpertKey, level: int) -> None:
        self._levels[(tier, *key)] = level
        own, slower = self._levels[:, key.layer, key.expert]
        self._places[key] = place_of(int(own), int(slower))
