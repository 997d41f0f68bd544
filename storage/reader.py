"""Reads of planes into the caller's buffers: past the page cache, with one call, and verified.

Files are never mapped: access to a mapped file that became shorter kills the process instead of raising TruncatedFile.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple

import xxhash

from storage.base import LABELS, ByteRange, ExpertKey, Plane, PlaneReader
from storage.errors import ChecksumMismatch, UserError
from storage.lock import StoreLock
from storage.manifest import Manifest
from storage.manifest_entries import LayerRecords, RecordEntry
from storage.record import RecordGeometry
from storage.record_file import VERIFY, RecordFile, pieces

_log = logging.getLogger("edgemoe")


class RecordReader(PlaneReader, AbstractContextManager["RecordReader"]):
    """Reads the records of a store; created by `open`, a context manager. Thread-safe except for `close`."""

    def __init__(self, geometry: RecordGeometry) -> None:
        self._geometry = geometry
        planes = list(Plane)[: len(geometry.planes)]
        pairs = [(first, last) for first in planes for last in planes if first <= last]
        self._spans = {pair: geometry.span(*pair) for pair in pairs}
        self._lengths = {
            (first, last): [plane.length for plane in geometry.planes[first : last + 1]]
            for first, last in pairs
        }
        self._shards: dict[int, _Shard] = {}
        self._resources = ExitStack()
        self._lock = threading.Lock()
        self._bytes_read = 0
        self._closed = self._buffered = False

    @classmethod
    def open(cls, directory: Path, manifest: Manifest) -> RecordReader:
        """Opens every layer's file, and locks the store against writers until `close`.

        Args:
            directory: of the store.
            manifest: of the store.

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
        reader = cls(manifest.geometry)
        try:
            reader._resources.enter_context(StoreLock(directory, exclusive=False))
            for layer, records in manifest.layers.items():
                reader._open_shard(layer, directory / records.file, records)
        except BaseException:
            reader.close()
            raise
        return reader

    @property
    def bytes_read(self) -> int:
        """Bytes read from disk since opening, by every thread."""
        with self._lock:
            return self._bytes_read

    @property
    def direct(self) -> bool:
        """Whether every read so far went past the page cache."""
        return not self._buffered

    def read(self, key: ExpertKey, first: Plane, last: Plane, into: Sequence[memoryview]) -> int:
        """Reads planes with one preadv where possible. A transient error is retried for PATIENCE.

        Raises:
            TruncatedFile, ChecksumMismatch, ReadFailed: with layer, expert, plane, path and offset.
            ValueError: the reader is closed, the store has no such expert, or the buffers' length is wrong.
        """
        if self._closed:
            raise ValueError("the reader is closed")
        shard = self._shards.get(key.layer)
        if shard is None or not 0 <= key.expert < len(shard.records):
            raise ValueError(f"expected an expert of the store, got {key}")
        offset, length = self._spans[first, last]
        wanted = f"planes {LABELS[first]} to {LABELS[last]} of layer {key.layer}, expert {key.expert}"
        if (size := sum(map(len, into))) != length:
            raise ValueError(f"expected buffers of {length} bytes for {wanted}, got {size}")
        span = ByteRange(shard.records[key.expert].offset + offset, length)
        retried = shard.file.fill(span, into, wanted)
        with self._lock:
            self._bytes_read += length
            self.retries += retried
        self._verify(shard, key, first, last, into)
        return length

    def close(self) -> None:
        """Closes every descriptor and unlocks the store. Idempotent.

        All reads of other threads must have returned.
        """
        self._closed = True
        self._resources.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open_shard(self, layer: int, path: Path, records: LayerRecords) -> None:
        end = max(record.offset for record in records.records) + self._geometry.record_bytes
        wanted = f"the experts of layer {layer} in {path}"
        file = RecordFile(path, end, wanted, VERIFY, self._resources, self._went_buffered)
        self._shards[layer] = _Shard(file, records.records)

    def _verify(
        self, shard: _Shard, key: ExpertKey, first: Plane, last: Plane, into: Sequence[memoryview]
    ) -> None:
        record = shard.records[key.expert]
        start = self._geometry.planes[first].offset
        whole = list(map(len, into)) == self._lengths[first, last]  # a buffer for each plane
        for index in range(first, last + 1):
            plane = self._geometry.planes[index]
            digest = xxhash.xxh3_64()
            if whole:
                digest.update(into[index - first])
            else:
                for piece in pieces(into, plane.offset - start, plane.length):
                    digest.update(piece)
            if digest.intdigest() != record.checksums[index]:
                label = f"plane {Plane(index).label} of layer {key.layer}, expert {key.expert}"
                wanted = f"checksum {record.checksums[index]:016x} for {label}"
                found = (
                    f"{digest.hexdigest()} from {shard.file.path} at offset {record.offset + plane.offset}"
                )
                raise ChecksumMismatch(wanted, found, VERIFY)

    def _went_buffered(self, path: Path) -> None:
        with self._lock:
            already, self._buffered = self._buffered, True
        if not already:
            _log.warning("%s: the file system refuses O_DIRECT; reading through the page cache, slower", path)


class _Shard(NamedTuple):
    file: RecordFile
    records: Sequence[RecordEntry]
