"""Sizes of a model on disk, the smallest limit that runs it, and how much of it common sizes of memory hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.console.sizes import format_least, format_size
from edgemoe.errors import DoesNotFit
from edgemoe.memory.overhead import suggested_limits
from edgemoe.policy.settings import RunSettings

if TYPE_CHECKING:
    from edgemoe.models.store_model import StoreModel
    from edgemoe.storage.convert.checkpoint import Checkpoint

GB = 10**9
VRAM, RAM = (8, 12, 16, 24), (8, 16, 32, 64)
"""Sizes of memory in GB that graphics cards and computers have."""

OTHERS_VRAM, OTHERS_RAM = GB // 2, 2 * GB
"""Bytes of each that a driver and a screen, and the system and other programs, are assumed to take."""

_ANY = 10**15
"""Bytes: a limit that holds every model."""

SHARE_LEVEL = 4
"""The level at which the part that stays is given where not all experts stay at the store's highest level."""


@dataclass(frozen=True)
class Part:
    """How much of a model's experts stays in one size of memory.

    Args:
        level: the store's highest level where all experts stay at it, else SHARE_LEVEL.
        percent: the share of the experts that fit at that level; 0: the model does not run in this memory.
    """

    level: int
    percent: int

    def __str__(self) -> str:
        if not self.percent:
            return "too small"
        return f"{'all' if self.percent == 100 else f'{self.percent} %'} at {self.level} bits"


@dataclass(frozen=True)
class WhatFits:
    """A model's sizes, planned with a context of 4,096 tokens or the model's own, if that is less.

    Args:
        download_bytes: bytes of its weights as they are downloaded; None: it is already converted.
        store_bytes: bytes of its store.
        smallest_limit: bytes, the smallest --vram-limit that runs it.
        vram: GB of a graphics card's memory, of VRAM -> the part of the experts that stays there.
        ram: GB of a computer's memory without a graphics card, of RAM -> the same.
    """

    download_bytes: int | None
    store_bytes: int
    smallest_limit: int
    vram: dict[int, Part]
    ram: dict[int, Part]

    @classmethod
    def of_model(cls, model: Path) -> WhatFits:
        """Plans a model by its name or path; of a model that is not converted only the headers are read.

        Raises:
            UserError, BadManifest, BadHeader, ModelRefused: from resolve.store_or_headers and StoreModel.
        """
        from edgemoe.kernels.registry import compute
        from edgemoe.models.resolve import store_or_headers
        from edgemoe.models.store_model import StoreModel

        with store_or_headers(model, compute().layout.name) as found:
            return (
                cls._of(StoreModel.open(found), None) if isinstance(found, Path) else cls.of_checkpoint(found)
            )

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> WhatFits:
        """Plans the store that a first use would make of a checkpoint.

        Raises:
            ModelRefused, MissingTensor: the checkpoint cannot be converted.
        """
        from edgemoe.models.store_model import StoreModel

        return cls._of(StoreModel.planned(checkpoint), checkpoint.nbytes)

    @classmethod
    def _of(cls, store: StoreModel, download_bytes: int | None) -> WhatFits:
        experts, kv = store.record_bytes, store.shape.kv.moving()
        on_card = replace(store, shape=replace(store.shape, kv=kv))
        vram = {size: suggested_limits(0, size * GB - OTHERS_VRAM)[0] for size in VRAM}
        ram = {size: suggested_limits(size * GB - OTHERS_RAM, None)[0] for size in RAM}
        return cls(
            download_bytes=download_bytes,
            store_bytes=experts + store.shape.dense_bytes,
            smallest_limit=store.plan(vram_limit=_ANY).minimum_vram_bytes,
            vram={size: _part(on_card, limit) for size, limit in vram.items()},
            ram={size: _part(store, limit) for size, limit in ram.items()},
        )

    def as_json(self) -> dict[str, Any]:
        """One JSON object."""
        return asdict(self)

    def lines(self) -> tuple[str, ...]:
        """Lines for people."""
        download = "" if self.download_bytes is None else f"{format_size(self.download_bytes)} to download, "
        rows = (("in the memory of a graphics card", self.vram), ("in RAM without a graphics card", self.ram))
        return (
            f"{download}{format_size(self.store_bytes)} as a store",
            f"smallest limit that works: --vram-limit {format_least(self.smallest_limit)}",
            *(
                f"experts that stay {place}: " + ", ".join(f"{size} GB {part}" for size, part in row.items())
                for place, row in rows
            ),
        )


def _part(store: StoreModel, limit: int) -> Part:
    """The part of a store's experts that stays within a limit in bytes."""
    highest = store.manifest.max_level
    try:
        plan = store.plan(vram_limit=limit, settings=RunSettings(levels=(highest,)))
    except DoesNotFit:
        return Part(SHARE_LEVEL, 0)
    for level in (highest, SHARE_LEVEL):
        if plan.experts_resident[str(level)] >= store.shape.experts:
            return Part(level, 100)
    return Part(SHARE_LEVEL, plan.experts_resident[str(SHARE_LEVEL)] * 100 // store.shape.experts)
