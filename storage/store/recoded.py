"""The files of a store's experts with other codes, written next to the present ones, which they replace at once.

The store can be read meanwhile. Names of the new files contain their run, so a killed run resumes with the next layer,
and files of another run are never mixed with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from edgemoe.errors import StoreBusy
from edgemoe.storage.convert.source_error import SourceError
from edgemoe.storage.files.atomic import require_free
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.record.planes import Bytes
from edgemoe.storage.store.calibration import CALIBRATION_NAME
from edgemoe.storage.store.codes import CalibratedCodes
from edgemoe.storage.store.dense_file import write_dense_file
from edgemoe.storage.store.layer_file import complete_layers, shards, write_layer
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest, is_dense_name
from edgemoe.storage.store.manifest_entries import FileEntry
from edgemoe.storage.store.manifest_updates import save_codes


class RecodedLayers:
    """The new files of one run.

    Args:
        directory: directory of the store.
        manifest: the manifest of the store.
        codes: how the new codes are chosen.

    Attributes:
        directory: directory of the store.
        counts: layer -> its number of experts.
    """

    def __init__(self, directory: Path, manifest: Manifest, codes: CalibratedCodes) -> None:
        self.directory, self._geometry, self._codes = directory, manifest.geometry, codes
        self.counts = {layer: len(found.records) for layer, found in sorted(manifest.layers.items())}
        self._complete = complete_layers(directory, self._geometry, codes.run)
        self._dense: dict[str, FileEntry] = {}

    def missing(self) -> list[int]:
        """Layers without a complete file of this run, ascending."""
        return [layer for layer in self.counts if layer not in self._complete]

    def require_free(self) -> None:
        """Raises DoesNotFit if the disk has too little space for the files that are missing."""
        sizes = (self.counts[layer] * self._geometry.of_layer(layer).record_bytes for layer in self.missing())
        require_free(self.directory / MANIFEST_NAME, sum(sizes))

    def write(self, layer: int, records: Iterable[Bytes], error: SourceError) -> None:
        """Writes the file of a layer. Arguments and errors: see layer_file.write_layer."""
        count, run = self.counts[layer], self._codes.run
        found = write_layer(self.directory, layer, self._geometry, count, records, error, run)
        self._complete[layer] = found, error

    def write_dense(
        self, specs: Mapping[str, tuple[str, Sequence[int]]], tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Writes a new file of dense weights. Arguments and errors: see dense_file.write_dense_file."""
        name = f"dense-{self._codes.run}.safetensors"
        self._dense[name] = write_dense_file(self.directory / name, specs, tensors)

    def finish(self) -> Manifest:
        """Makes the store use the new files, once all are written, and removes what belongs to the old codes.

        A calibration of levels and compensators were measured on the old codes.
        """
        error = SourceError()
        for layer in self.counts:
            error.add(self._complete[layer][1])
        layers = {layer: self._complete[layer][0] for layer in self.counts}
        source_error = error.relative if error.total else None
        made = save_codes(self.directory, self._codes, layers, source_error, self._dense)
        (self.directory / CALIBRATION_NAME).unlink(missing_ok=True)
        remove_others(self.directory, made)
        return made


def remove_others(directory: Path, manifest: Manifest) -> None:
    """Removes files of weights that the store does not use, or none while a reader, which may open them, uses it.

    Files that stay cost disk alone, and the next call removes them.
    """
    with suppress(StoreBusy), StoreLock(directory, exclusive=True):
        kept = {manifest.dense_name, *(layer.file for layer in manifest.layers.values())}
        for path in [*shards(directory), *(each for each in directory.iterdir() if is_dense_name(each.name))]:
            if path.name not in kept:
                with suppress(OSError):
                    path.unlink()
