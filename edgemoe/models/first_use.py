"""What the first use of a big checkpoint is about to do, told before it begins."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from edgemoe.console.sizes import format_size
from edgemoe.families.table import family_of
from storage.checkpoint import Checkpoint
from storage.convert import store_bytes

BIG_BYTES = 1_000_000_000
"""Weights of a source from which on people wait."""

ASSUMED_RATE = 200_000_000
"""Bytes of source converted a second: what two cores and an SSD do with bf16 weights (tools/timing/convert.py)."""

DOWNLOAD_RATE = 50_000_000
"""The same where the source has to come over a network first, which is then what takes the time."""


def announce(checkpoint: Checkpoint, name: str, directory: Path, rate: int) -> None:
    """Says on stderr what a conversion that begins now will take, if it is a long one.

    Arguments and errors are announcement's.
    """
    if source_bytes(checkpoint) >= BIG_BYTES:
        print(*announcement(checkpoint, name, directory, rate), sep="\n", file=sys.stderr, flush=True)


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
    size = source_bytes(checkpoint)
    store = store_bytes(checkpoint, family_of(checkpoint.config), max_level=None, dense_bits=16)
    there = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    return (
        f"{name} is used for the first time: its {format_size(size)} of weights will be converted once, into a "
        f"store of {format_size(store)} in {directory} ({format_size(free)} free)",
        f"this takes about {size / rate / 60:.0f} min (assumed: {format_size(rate)}/s); interrupted, "
        "it goes on where it stopped",
    )


def source_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of a checkpoint's weights."""
    return sum(checkpoint.nbytes(tensor) for tensor in checkpoint.names())
