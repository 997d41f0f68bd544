"""What the first use of a big checkpoint is about to do, told before it begins."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgemoe.model_cache import stores_directory
from edgemoe.sizes import format_size
from storage.checkpoint import Checkpoint
from storage.manifest import MANIFEST_NAME

BIG_BYTES = 1_000_000_000
"""Weights of a source from which on people wait."""

ASSUMED_RATE = 50_000_000
"""Bytes of source converted a second: what two cores do with bf16 weights on a disk that is no slower."""


def conversion_ahead(model: Path) -> tuple[str, str] | None:
    """Two lines on the conversion that using `model` will begin with; None: there is none, or a short one.

    Args:
        model: as given to --model. A model of the Hub, which is not here yet, tells its size as it comes.

    Raises:
        ModelRefused, MissingTensor, BadHeader: as Checkpoint.open.
    """
    if (model / MANIFEST_NAME).exists() or not (model / "config.json").exists():
        return None
    checkpoint = Checkpoint.open(model)
    size = sum(checkpoint.nbytes(name) for name in checkpoint.names())
    mark = checkpoint.fingerprint()[:16]
    if size < BIG_BYTES or any(stores_directory().glob(f"*{mark}*/{MANIFEST_NAME}")):
        return None
    return announcement(
        model.name, size, stores_directory(), packed="quantization_config" in checkpoint.config
    )


def announcement(name: str, size: int, directory: Path, *, packed: bool) -> tuple[str, str]:
    """What, how much disk, and how long.

    Args:
        name: of the model.
        size: bytes of its weights.
        directory: where its store will lie; it may not exist yet.
        packed: the weights are quantized already, and do not get smaller.
    """
    there = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    free, store = shutil.disk_usage(there).free, size * (1.1 if packed else 0.6)
    minutes = size / ASSUMED_RATE / 60
    return (
        f"{name} is used for the first time: its {format_size(size)} of weights will be converted once, into a "
        f"store of about {format_size(store)} in {directory} ({format_size(free)} free)",
        f"this takes about {minutes:.0f} min (assumed: {format_size(ASSUMED_RATE)}/s); interrupted, "
        "it goes on where it stopped",
    )
