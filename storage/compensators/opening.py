"""The files of the compensators that a manifest lists, which another process may replace meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgemoe.errors import MissingTensor, StoreBusy
from edgemoe.storage.compensators.reader import CompensatorReader
from edgemoe.storage.store.manifest import Manifest


@contextmanager
def of_manifest(directory: Path, manifest: Manifest) -> Iterator[None]:
    """Opens files of a manifest's compensators within the block.

    Raises:
        StoreBusy: others have replaced them since the manifest was read.
    """
    try:
        yield
    except MissingTensor as error:
        if Manifest.load(directory).compensators == manifest.compensators:
            raise
        raise StoreBusy(
            f"the compensators that {directory} had a moment ago",
            "others, which `edgemoe compensate` has just written",
            "run the command again",
        ) from error


def reader_of_store(directory: Path, manifest: Manifest) -> CompensatorReader:
    """Opens the compensators of a store that has some.

    Raises:
        StoreBusy, DamagedData, ReadFailed: as of_manifest and CompensatorReader.
    """
    assert manifest.compensators
    with of_manifest(directory, manifest):
        return CompensatorReader(directory, manifest.compensators)
