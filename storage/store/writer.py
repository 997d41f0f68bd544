"""Writing of a store: one file of records per layer, dense weights, companions, and store.json last.

Every file is written atomically. The checksums of a layer's planes are in the metadata of its own file, so a killed
conversion resumes with the next layer, and its result has the bytes of an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash

from edgemoe.errors import UserError
from edgemoe.storage.convert.source_error import SourceError
from edgemoe.storage.files.atomic import PARTIAL, refused, replacing, require_free, sync_directory, write_all
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.files.source_file import read_whole
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.planes import Bytes
from edgemoe.storage.record.probes import PROBES
from edgemoe.storage.store.dense_file import write_dense_file
from edgemoe.storage.store.layer_file import complete_layers, write_layer
from edgemoe.storage.store.manifest import DENSE_NAME, HEAD_NAME, MANIFEST_NAME, MARKER_NAME, Manifest
from edgemoe.storage.store.manifest_entries import FileEntry, LayerRecords
from edgemoe.storage.store.manifest_updates import save_files, save_head

if TYPE_CHECKING:
    from edgemoe.storage.record.offsets import RecordGeometry
    from edgemoe.storage.store.stored_head import StoredHead


class StoreWriter:
    """Writes a store, or the missing files of an unfinished one. A context manager; not thread-safe.

    Inside the context no other process can read or write the store. Exit without `finish` keeps complete files for the
    next run.

    Args:
        directory: new, empty, or a store of exactly these arguments, finished or not.
        geometry: the geometry of every record.
        layout: the layout that records are packed in.
        source: fingerprint of the checkpoint.
        dense_bits: bits per weight of the matrices for write_dense, one of manifest.DENSE_BITS.
        head_bits: bits per weight of embedding and head, one of dense_shapes.HEAD_BITS.

    Raises:
        UserError: on entry: the directory holds other files, which are not changed.
        StoreBusy: on entry: another process uses the store.
        DoesNotFit: on entry and from every method that writes: the disk is full.
    """

    def __init__(
        self,
        directory: Path,
        *,
        geometry: RecordGeometry,
        layout: Layout,
        source: str,
        dense_bits: int,
        head_bits: int = 8,
    ) -> None:
        self.directory = directory
        sizes = geometry, dense_bits
        self._empty = Manifest(
            source, layout.name, PROBES[layout.name], *sizes, layers={}, files={}, head_bits=head_bits
        )
        self._geometry = geometry
        self._layers: dict[int, LayerRecords] = {}
        self._errors: dict[int, SourceError] = {}
        self._files: dict[str, FileEntry] = {}
        self._head: StoredHead | None = None
        self._lock: StoreLock | None = None

    def __enter__(self) -> StoreWriter:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = StoreLock(self.directory, exclusive=True)
        try:
            self._claim()
            complete = complete_layers(self.directory, self._geometry)
            self._layers = {layer: records for layer, (records, _) in complete.items()}
            self._errors = {layer: error for layer, (_, error) in complete.items()}
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock:
            self._lock.close()

    def finished_layers(self) -> set[int]:
        """Layers with a complete file, from this or an earlier run."""
        return set(self._layers)

    def require_free(self, size: int) -> None:
        """Raises DoesNotFit if fewer than `size` bytes are free on the store's disk."""
        require_free(self.directory / MANIFEST_NAME, size)

    def write_layer(
        self, layer: int, count: int, records: Iterable[Bytes], error: SourceError | None = None
    ) -> None:
        """Writes a layer's experts, from expert 0 on, with one record in memory at a time.

        Args:
            layer: number of the layer in the model.
            count: number of records.
            records: uint8 [record_bytes of the layer] each; BLOCK-aligned ones are written past the page cache.
            error: the error of the layer against its source; complete once the last record is taken.

        Raises:
            ValueError: another number or length of records; no file is written.
            DoesNotFit: the disk is full.
        """
        error = error or SourceError()
        self._layers[layer] = write_layer(self.directory, layer, self._geometry, count, records, error)
        self._errors[layer] = error

    def write_dense(
        self, specs: Mapping[str, tuple[str, Sequence[int]]], tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Writes dense.safetensors. Arguments and errors: see write_dense_file."""
        self._files[DENSE_NAME] = write_dense_file(self.directory / DENSE_NAME, specs, tensors)

    def write_file(
        self,
        name: str,
        specs: Mapping[str, tuple[str, Sequence[int]]],
        tensors: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        """Writes a further safetensors file of this name. Other arguments and errors: see write_dense_file."""
        self._files[name] = write_dense_file(self.directory / name, specs, tensors)

    def add_files(self) -> Manifest:
        """Adds the files that were written to the store.json of a finished store.

        Raises:
            DoesNotFit, WriteFailed: store.json cannot be written.
        """
        return save_files(self.directory, self._files)

    def write_head(self, head: StoredHead, dense: FileEntry) -> None:
        """Takes a head for further tokens, whose files are in the directory (convert.head_weights)."""
        self._head, self._files[HEAD_NAME] = head, dense

    def add_head(self, head: StoredHead, dense: FileEntry) -> Manifest:
        """Adds a head, whose files are in the directory, to the store.json of a finished store.

        Raises:
            DoesNotFit, WriteFailed: store.json cannot be written.
        """
        return save_head(self.directory, head, dense)

    def copy(self, path: Path) -> None:
        """Copies a small file (config, tokenizer, chat template) into the store, under its own name."""
        raw = read_whole(path)
        with replacing(self.directory / path.name, len(raw)) as fd:
            write_all(fd, raw)
        self._files[path.name] = FileEntry(len(raw), xxhash.xxh3_64_intdigest(raw))

    def finish(self, source_format: str = "") -> Manifest:
        """Writes store.json, which makes the directory a store, once all other files are written.

        Args:
            source_format: name of the source weights' format, for display.
        """
        error = SourceError()
        for layer in sorted(self._errors):
            error.add(self._errors[layer])
        manifest = replace(
            self._empty,
            layers=self._layers,
            files=self._files,
            source_format=source_format,
            source_error=error.relative if error.total else None,
            head=self._head,
        )
        marker = self.directory / MARKER_NAME
        manifest.save(marker)
        # The marker is renamed to the manifest: at every moment exactly one of the two exists.
        final = self.directory / MANIFEST_NAME
        try:
            marker.replace(final)
            sync_directory(self.directory)
        except OSError as error:
            raise refused(final, len(manifest.to_json()), error) from error
        return manifest

    def _claim(self) -> None:
        """Checks that the directory is empty or holds this conversion, and writes its marker."""
        for name in (MANIFEST_NAME, MARKER_NAME):
            path = self.directory / name
            if path.exists():
                found = Manifest.read(path)
                conversion = replace(
                    found,
                    layers={},
                    files={},
                    source_format="",
                    source_error=None,
                    compensators=None,
                    codes=None,
                    head=None,
                    dense_choice=None,
                )
                if conversion != self._empty:
                    raise self._occupied(_difference(found, self._empty))
                return
        others = sorted(p.name for p in self.directory.iterdir() if not p.name.endswith(PARTIAL))
        if others:
            raise self._occupied(f"{others[0]} and no unfinished conversion")
        self._empty.save(self.directory / MARKER_NAME)

    def _occupied(self, finding: str) -> UserError:
        return UserError(
            f"{self.directory} free for this store", finding, "choose another directory, or remove this one"
        )


def _difference(present: Manifest, manifest: Manifest) -> str:
    """Describes the first difference between two conversions."""
    for name in ("source", "layout", "dense_bits", "head_bits", "max_level", "geometry"):
        theirs, ours = getattr(present, name), getattr(manifest, name)
        if theirs != ours:
            return f"a conversion with {name} {theirs}, not {ours}"
    return "another conversion"
