"""Announces a long conversion before it begins: sizes, place and duration."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from edgemoe.console.printable import printable
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
    """Prints two lines on stderr if the source has at least BIG_BYTES: sizes and free disk, then the duration.

    Args:
        checkpoint: the source; for a model of the Hub, its headers suffice.
        name: of the model, for people.
        directory: parent of the store; it may not exist yet.
        rate: assumed bytes of source a second.

    Raises:
        ModelRefused, MissingTensor: from store_bytes.
    """
    size = sum(checkpoint[tensor].nbytes for tensor in checkpoint.names())
    if size < BIG_BYTES:
        return
    store = store_bytes(checkpoint, family_of(checkpoint.config), max_level=None, dense_bits=16)
    existing = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    print(
        f"{printable(name)} is used for the first time: its {format_size(size)} of weights will be converted once, "
        f"into a store of {format_size(store)} in {printable(directory)} ({format_size(free)} free)",
        f"this takes about {size / rate / 60:.0f} min (assumed: {format_size(rate)}/s); if interrupted, the next use "
        "resumes it",
        sep="\n",
        file=sys.stderr,
        flush=True,
    )
