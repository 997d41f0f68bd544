"""Reads of planes into the caller's buffers: past the page cache, with one call, and verified.

Files are never mapped: access to a mapped file that became shorter kills the process instead of raising TruncatedFile.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import xxhash

from edgemoe.errors import ChecksumMismatch, UserError
from edgemoe.storage.base import LABELS, ByteRange, ExpertKey, Plane
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.manifest_entries import RecordEntry
from edgemoe.storage.store.record_file import VERIFY, FileReader, RecordFiles, pieces

_LENGTH = attrgetter("length")


class RecordReader(FileReader):
    """Reads the records of a store; created by `open`, a context manager. Thread-safe except for `close`.

    Args:
        geometry: the geometry of the records.
        files: open, of every layer with experts.
        records: layer -> its records.
    """

    def __init__(
        self, geometry: RecordGeometry, files: RecordFiles, records: Mapping[int, Sequence[RecordEntry]]
    ) -> None:
        super().__init__(files)
        self._planes, self._records = {layer: geometry.of_layer(layer).planes for layer in records}, records

    @classmethod
    def open(cls, directory: Path, manifest: Manifest) -> RecordReader:
        """Opens every layer's file, and locks the store against writers until `close`.

        Args:
            directory: the directory of the store.
            manifest: the manifest of the store.

        Raises:
            MissingTensor, TruncatedFile: a file is missing, or shorter than the manifest says.
            ReadFailed: a file cannot be opened.
            StoreBusy: another process is writing the store.
            UserError: the platform has no preadv or no flock.
        """
        if not hasattr(os, "preadv"):
            raise UserError(
                f"os.preadv to read {directory}",
                f"Python on {sys.platform}, which has no preadv",
                "use Linux or macOS; WSL 2 works on Windows",
            )
        with ExitStack() as opened:
            files = opened.enter_context(RecordFiles(directory, VERIFY))
            for layer, found in manifest.layers.items():
                size = manifest.geometry.of_layer(layer).record_bytes
                path, end = directory / found.file, max(record.offset for record in found.records) + size
                files.open(layer, path, end, f"the experts of layer {layer} in {path}")
            opened.pop_all()
        return cls(
            manifest.geometry, files, {layer: found.records for layer, found in manifest.layers.items()}
        )

    @property
    def direct(self) -> bool:
        """Whether every read so far went past the page cache."""
        return self._files.direct

    def read(self, key: ExpertKey, first: Plane, last: Plane, into: Sequence[memoryview]) -> int:
        """Reads planes with one preadv where possible. A transient error is retried for PATIENCE.

        Raises:
            TruncatedFile, ChecksumMismatch, ReadFailed: with layer, expert, plane, path and offset.
            ValueError: the reader is closed, the store has no such expert or the layer no such plane, or the buffers'
                length is wrong.
        """
        if self._files.closed:
            raise ValueError("the reader is closed")
        records = self._records.get(key.layer, ())
        if not 0 <= key.expert < len(records):
            raise ValueError(f"expected an expert of the store, got {key}")
        planes = self._planes[key.layer]
        if last >= len(planes):
            raise ValueError(
                f"expected planes up to {Plane(len(planes) - 1).label} of {key}, got {last.label}"
            )
        offset, (start, size) = planes[first].offset, planes[last]
        length = start + size - offset
        wanted = f"planes {LABELS[first]} to {LABELS[last]} of layer {key.layer}, expert {key.expert}"
        if (given := sum(map(len, into))) != length:
            raise ValueError(f"expected buffers of {length} bytes for {wanted}, got {given}")
        record = records[key.expert]
        self._files.of_layer[key.layer].fill(ByteRange(record.offset + offset, length), into, wanted)
        self._verify(record, key, planes[first : last + 1], into, first)
        return length

    def _verify(
        self,
        record: RecordEntry,
        key: ExpertKey,
        planes: Sequence[ByteRange],
        into: Sequence[memoryview],
        first: Plane,
    ) -> None:
        """Compares the planes from `first` on, at their places in the record, with their checksums."""
        whole = [*map(len, into)] == [*map(_LENGTH, planes)]  # a buffer for each plane
        for number, plane in enumerate(planes):
            index, digest = first + number, xxhash.xxh3_64()
            if whole:
                digest.update(into[number])
            else:
                for piece in pieces(into, plane.offset - planes[0].offset, plane.length):
                    digest.update(piece)
            if digest.intdigest() != record.checksums[index]:
                label = f"plane {Plane(index).label} of layer {key.layer}, expert {key.expert}"
                wanted = f"checksum {record.checksums[index]:016x} for {label}"
                path = self._files.of_layer[key.layer].path
                found = f"{digest.hexdigest()} from {path} at offset {record.offset + plane.offset}"
                raise ChecksumMismatch(wanted, found, VERIFY)


def with_head(manifest: Manifest) -> Manifest:
    """Returns a manifest with the experts of its head as one more layer, for readers of every record."""
    head = manifest.head
    if head is None:
        return manifest
    return replace(manifest, layers={**manifest.layers, head.layer: head.experts}, head=None)
