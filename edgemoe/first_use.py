"""What the first use of a big checkpoint is about to do, told before it begins."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgemoe.families import family_of, require_known
from edgemoe.model_cache import stores_directory
from edgemoe.sizes import format_size
from storage.checkpoint import Checkpoint, find_gguf
from storage.convert import store_bytes
from storage.manifest import MANIFEST_NAME

BIG_BYTES = 1_000_000_000
"""Weights of a source from which on people wait."""

ASSUMED_RATE = 200_000_000
"""Bytes of source converted a second: what two cores and an SSD do with bf16 weights (tools/time_convert.py)."""

DOWNLOAD_RATE = 50_000_000
"""The same where the source has to come over a network first, which is then what takes the time."""


def conversion_ahead(model: Path) -> tuple[str, str] | None:
    """Two lines on the conversion that using `model` will begin with; None: there is none, or a short one.

    Args:
        model: as given to --model. A model of the Hub, which is not here yet, tells its size as it comes.

    Raises:
        ModelRefused, MissingTensor, BadHeader: as Checkpoint.open and store_bytes.
    """
    if (model / MANIFEST_NAME).exists() or not ((model / "config.json").exists() or find_gguf(model)):
        return None
    require_known(model)
    checkpoint = Checkpoint.open(model)
    size = sum(checkpoint.nbytes(name) for name in checkpoint.names())
    mark = checkpoint.fingerprint()[:16]
    if size < BIG_BYTES or any(stores_directory().glob(f"*{mark}*/{MANIFEST_NAME}")):
        return None
    return announcement(checkpoint, model.name, stores_directory(), ASSUMED_RATE)


def announcement(checkpoint: Checkpoint, name: str, directory: Path, rate: int) -> tuple[str, str]:
    """What, how much disk, and how long.

    Args:
        checkpoint: the source; of one on the Hub, its headers are here.
        name: of the model, for people.
        directory: where its store will lie; it may not exist yet.
        rate: bytes of source a second that are assumed.

    Raises:
        ModelRefused, MissingTensor: as store_bytes.
    """
    size = sum(checkpoint.nbytes(tensor) for tensor in checkpoint.names())
    store = store_bytes(checkpoint, family_of(checkpoint.config), max_level=None, dense_bits=16)
    there = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    return (
        f"{name} is used for the first time: its {format_size(size)} of weights will be converted once, into a "
        f"store of {format_size(store)} in {directory} ({format_size(free)} free)",
        f"this takes about {size / rate / 60:.0f} min (assumed: {format_size(rate)}/s); interrupted, "
        "it goes on where it stopped",
    )
