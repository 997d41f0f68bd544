"""The compensators of small_checkpoint.py's model, and every file of a store with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from edgemoe.families.table import family_of
from edgemoe.storage.compensators.making import compensate
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.store.manifest import Manifest


def add(
    source: Path | None,
    store: Path,
    *,
    base_level: int = 2,
    rule: str = "error",
    mean_rank: int = 4,
    threads: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Manifest:
    """Compensates a store of small_conversion.py."""
    return compensate(
        source,
        store,
        family_of(Checkpoint.open(source).config) if source else None,
        base_level=base_level,
        rule=rule,
        mean_rank=mean_rank,
        threads=threads,
        progress=progress,
    )


def tree(directory: Path) -> dict[str, bytes]:
    """Every file in a directory and its folders by its path."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
