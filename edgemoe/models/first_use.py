"""Announces a long conversion before it begins: sizes, place and duration."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from edgemoe.console.sizes import format_size
from edgemoe.families.table import family_of
from storage.checkpoint import Checkpoint
from storage.convert import store_bytes

BIG_BYTES = 1_000_000_000
"""Bytes of weights from which on a conversion is announced."""

ASSUMED_RATE = 200_000_000
"""Bytes of source converted a second by two cores and an SSD, for bf16 weights (tools/timing/convert.py)."""

DOWNLOAD_RATE = 50_000_000
"""Bytes of source downloaded and converted a second, where the network limits."""


def announce(checkpoint: Checkpoint, name: str, directory: Path, rate: int) -> None:
    """Prints the announcement on stderr if the source has at least BIG_BYTES. Arguments are announcement's."""
    if source_bytes(checkpoint) >= BIG_BYTES:
        print(*announcement(checkpoint, name, directory, rate), sep="\n", file=sys.stderr, flush=True)


def announcement(checkpoint: Checkpoint, name: str, directory: Path, rate: int) -> tuple[str, str]:
    """Two lines: sizes and free disk, then the duration.

    Args:
        checkpoint: the source; for a model of the Hub, its headers suffice.
        name: of the model, for people.
        directory: parent of the store; it may not exist yet.
        rate: assumed bytes of source a second.

    Raises:
        ModelRefused, MissingTensor: from store_bytes.
    """
    size = source_bytes(checkpoint)
    store = store_bytes(checkpoint, family_of(checkpoint.config), max_level=None, dense_bits=16)
    existing = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    return (
        f"{name} is used for the first time: its {format_size(size)} of weights will be converted once, into a "
        f"store of {format_size(store)} in {directory} ({format_size(free)} free)",
        f"this takes about {size / rate / 60:.0f} min (assumed: {format_size(rate)}/s); if interrupted, the next use "
        "resumes it",
    )


def source_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of a checkpoint's weights."""
    return sum(checkpoint[tensor].nbytes for tensor in checkpoint.names())
