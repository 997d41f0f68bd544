"""The conversion of small_checkpoint.py's model, and the files that it writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import small_checkpoint

from edgemoe.families.table import family_of
from edgemoe.storage.convert.run import Arrivals, convert
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.manifest import Manifest

FAMILY = family_of(small_checkpoint.CONFIG)


def run(
    source: Path,
    destination: Path,
    *,
    threads: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
    arrivals: Arrivals | None = None,
) -> Manifest:
    """Converts up to level 8, dense weights to 8 bits, in the generic layout."""
    return convert(
        source,
        destination,
        FAMILY,
        max_level=8,
        layout=LAYOUTS["cpu-generic"],
        dense_bits=8,
        progress=progress,
        threads=threads,
        arrivals=arrivals,
    )


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory by its name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}
