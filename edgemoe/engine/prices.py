"""The measured time of a bit from DRAM relative to a bit from the slowest tier."""

from __future__ import annotations

from contextlib import closing

from edgemoe.memory.plan import MemoryPlan
from edgemoe.models.store_model import StoreModel
from edgemoe.speed.tiers import copy_speed, read_speed
from edgemoe.storage.store.reader import RecordReader

SPEED_SECONDS, SPEED_BYTES = 0.1, 1 << 22
"""Time that each tier's speed is measured for, and bytes of a copy: both buffers fit in any workspace."""


def dram_price(store: StoreModel, plan: MemoryPlan) -> float:
    """Returns the time of a bit from DRAM as a fraction of the time of a bit from the slowest tier that is used.

    Where both tiers together have a block for every plane, bits come from DRAM alone once they have been read.

    Args:
        store: an opened store.
        plan: the division of the limit, with a DRAM tier.
    """
    kinds = store.form.kinds_at(plan.levels[0])
    fastest = {} if store.device else plan.vram_blocks
    blocks = {kind.name: fastest.get(kind.name, 0) + plan.dram_blocks.get(kind.name, 0) for kind in kinds}
    if all(count >= store.shape.experts for count in blocks.values()):
        return 1.0
    with closing(RecordReader.open(store.directory, store.manifest)) as reader:
        read = read_speed(reader, store.manifest, plan.levels[0], SPEED_SECONDS)
    return min(read / copy_speed(store.device, SPEED_BYTES, SPEED_SECONDS), 1.0)
