"""A version of an expert: the state to which a lease, a reservation's victim and the table of residents refer.

A version is one complete state of an expert: a level and a block of each kind that the level needs. It never changes.
Promotion and demotion put another version in its place, which shares the common blocks. A block returns to its arena
with the last version or reservation that refers to it, and a version lives as long as it is resident or pinned. So a
lease shows the same bytes until its release, through any promotion, demotion or eviction of its expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgemoe.cache.blocks import Indices, SharedBlocks
from edgemoe.cache.fixed_places import FixedPlaces
from edgemoe.cache.pool import Pool
from edgemoe.machine.device import Event
from edgemoe.storage.base import Blocks, ExpertKey

TierBlocks = SharedBlocks | Pool | FixedPlaces
"""The blocks of a tier: of one size per kind, in one pool of bytes, or with a place for each expert."""


@dataclass(eq=False, slots=True)
class Version:
    """A complete state of an expert.

    Args:
        key: the expert.
        level: the level that the blocks make.
        indices: kind's name -> index of the block.
        blocks: the blocks' bytes.
        arriving: events after the copies that still fill the blocks.
        pins: leases of the version, including reservations' leases.
    """

    key: ExpertKey
    level: int
    indices: Indices
    blocks: Blocks
    arriving: tuple[Event, ...] = ()
    pins: int = 0
