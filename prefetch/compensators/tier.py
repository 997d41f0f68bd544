"""Where compensators are kept and read."""

from __future__ import annotations

from typing import NamedTuple

from edgemoe.cache.plane_tier import PlaneTier
from edgemoe.storage.base import PlaneReader, ResidentForm


class CompensatorTier(NamedTuple):
    """Where compensators are kept: a tier in RAM, their form in it, and what reads them. The owner closes all of it."""

    tier: PlaneTier
    form: ResidentForm
    reader: PlaneReader
