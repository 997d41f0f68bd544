"""Announces a long conversion before it begins: sizes, place and duration."""

from __future__ import annotations

import shutil
from pathlib import Path

from edgemoe.console.sizes import format_size
from edgemoe.console.width import say
from edgemoe.errors import EdgemoeError
from edgemoe.families.head import head_of
from edgemoe.families.table import family_of
from edgemoe.machine.cgroups import cores
from edgemoe.models.conversion.calibration_time import calibration_seconds
from edgemoe.models.conversion.dense_default import DENSE_BITS
from edgemoe.models.conversion.first_codes import LONGEST
from edgemoe.speed.disk import measure_disk
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.run import store_bytes

SAMPLES = 8192
"""Tokens that `convert --calibrate` takes by default."""

BIG_BYTES = 1_000_000_000
"""Bytes of weights from which on a conversion is announced."""

CORE_RATE = 100_000_000
"""Bytes of bf16 weights that a core converts a second (docs/benchmarks/2026-11-21-convert.md)."""

DOWNLOAD_RATE = 50_000_000
"""Bytes of source downloaded a second: an assumption, as nothing is downloaded yet."""

PROBE = 64 << 20
"""Bytes written and read to measure the disk: a multiple of disk_speed.PIECE."""


def announce(checkpoint: Checkpoint, name: str, directory: Path, *, download: bool = False) -> None:
    """Prints on stderr if the source has at least BIG_BYTES: sizes and free disk, the duration, and better codes.

    Args:
        checkpoint: the source; for a model of the Hub, its headers suffice.
        name: the model's, for people.
        directory: parent of the store; it may not exist yet.
        download: the source is downloaded too.

    Raises:
        ModelRefused, MissingTensor: from store_bytes.
    """
    size = checkpoint.nbytes
    if size < BIG_BYTES:
        return
    family = family_of(checkpoint.config)
    head = head_of(family, checkpoint.config, checkpoint.names())
    store = store_bytes(checkpoint, family, max_level=None, dense_bits=DENSE_BITS, head=head)
    existing = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    say(
        f"{name} is used for the first time: its {format_size(size)} of weights will be converted once, "
        f"into a store of {format_size(store)} in {directory} ({format_size(free)} free)\n"
        f"this takes about {_estimate(size, store, existing, download)}; if interrupted, the next use resumes it"
    )
    shortest, seconds = calibration_seconds(checkpoint), calibration_seconds(checkpoint, SAMPLES)
    if shortest is not None and seconds is not None and shortest >= LONGEST:
        say(
            "`edgemoe convert CHECKPOINT STORE --calibrate self --dense-bits 6` makes a store of a checkpoint on "
            "disk that loses less at 2 and 4 bits and reads fewer bytes per token, in about "
            f"{seconds / 60:.0f} min more"
        )


def _estimate(size: int, store: int, directory: Path, download: bool) -> str:
    """The duration of a conversion, and what it comes from: its slowest part, as all parts run side by side.

    Args:
        size, store: bytes of the source and of the store.
        directory: lies on the store's disk, which is measured; a disk that cannot be measured is left out.
        download: see announce.
    """
    parts = {f"{cores()} cores, {format_size(cores() * CORE_RATE)}/s": size / (cores() * CORE_RATE)}
    try:
        disk = measure_disk(directory, PROBE)
    except (OSError, EdgemoeError):
        pass
    else:
        parts[f"the disk reads {format_size(disk.read)}/s"] = size / disk.read
        parts[f"the disk writes {format_size(disk.write)}/s"] = store / disk.write
    if download:
        parts[f"a download at {format_size(DOWNLOAD_RATE)}/s, which is assumed"] = size / DOWNLOAD_RATE
    slowest = max(parts, key=lambda part: parts[part])
    return f"{parts[slowest] / 60:.0f} min ({slowest})"
