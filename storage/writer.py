"""Writing a store: one file of records a layer, dense weights, companions, and store.json last.

A file is there whole or not at all. The checksums of a layer's planes travel in its own file's metadata, so
a conversion that was killed goes on with the next layer, and ends in the bytes of an uninterrupted one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
import xxhash

from storage.atomic import PARTIAL, refused, replacing, require_free, sync_directory, write_all
from storage.base import BLOCK
from storage.errors import BadHeader, DamagedData, UserError
from storage.header import header_bytes, read_header, tensor_bytes
from storage.layout import Layout, probe
from storage.lock import StoreLock
from storage.manifest import MANIFEST_NAME, MARKER_NAME, Manifest
from storage.manifest_entries import FileEntry, LayerRecords, RecordEntry
from storage.planes import Bytes
from storage.record import RecordGeometry
from storage.source_error import SourceError
from storage.source_file import read_whole
from storage.unbuffered import aligned, bypass_cache

DENSE_NAME = "dense.safetensors"
CHECKSUMS_KEY = "xxh3_64"
"""Key in a layer file's metadata: 16 hex digits a plane, planes of a record and records in order."""

ERROR_KEY = "source_error"
"""Key in a layer file's metadata: SourceError's digits."""

_SHARD_NAME = re.compile(r"experts-(\d{5,})\.safetensors", re.ASCII)


def shard_name(layer: int) -> str:
    """Name of the file of a layer's records."""
    return f"experts-{layer:05d}.safetensors"


def tensor_name(layer: int, expert: int) -> str:
    """Name of a record's tensor in its layer's file."""
    return f"experts.{layer}.{expert}"


class StoreWriter:
    """Writes a store, or what an unfinished one still lacks. A context manager; not thread-safe.

    Between entering and leaving no other process can read or write the store. Leaving without `finish`
    keeps what is complete, for the next run.

    Args:
        directory: new, empty, or a store of exactly these arguments, finished or not.
        geometry: of every record.
        layout: that records are packed in.
        source: fingerprint of what is converted.
        dense_bits: 16 or 8, of the matrices given to write_dense.

    Raises:
        UserError: on entering: the directory holds something else. Nothing in it is changed then.
        StoreBusy: on entering: another process is using the store.
        DoesNotFit: on entering and from every method that writes: the disk is full.
    """

    def __init__(
        self, directory: Path, *, geometry: RecordGeometry, layout: Layout, source: str, dense_bits: int
    ) -> None:
        self._directory = directory
        self._empty = Manifest(source, layout.name, probe(layout.name), geometry, dense_bits, {}, {})
        self._geometry = geometry
        self._layers: dict[int, LayerRecords] = {}
        self._errors: dict[int, SourceError] = {}
        self._files: dict[str, FileEntry] = {}
        self._lock: StoreLock | None = None

    def __enter__(self) -> StoreWriter:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock = StoreLock(self._directory, exclusive=True)
        try:
            self._claim()
            self._layers = self._complete_layers()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock:
            self._lock.close()

    def finished_layers(self) -> set[int]:
        """Layers whose file is complete, from this run or an earlier one."""
        return set(self._layers)

    def require_free(self, size: int) -> None:
        """Raises DoesNotFit if fewer than `size` bytes are free where the store is."""
        require_free(self._directory / MANIFEST_NAME, size)

    def write_layer(
        self, layer: int, count: int, records: Iterable[Bytes], error: SourceError | None = None
    ) -> None:
        """Writes a layer's experts, from expert 0 on. Holds one record at a time.

        Args:
            layer: its number in the model.
            count: how many records there will be.
            records: uint8 [geometry.record_bytes] each; past the page cache go those that are BLOCK-aligned.
            error: of the layer against its source, complete when the last record has been taken.

        Raises:
            ValueError: records of another number or length; nothing is written then.
            DoesNotFit: the disk is full.
        """
        size = self._geometry.record_bytes
        path = self._directory / shard_name(layer)
        error = error or SourceError()
        header = _aligned(self._shard_header(layer, [(0,) * len(self._geometry.planes)] * count, error))
        checksums: list[tuple[int, ...]] = []
        with replacing(path, len(header) + count * size) as fd:
            # Written when they come: left to the page cache, they would all wait for the file's fsync.
            bypass_cache(fd)
            write_all(fd, header.data)
            for record in records:
                if record.nbytes != size or len(checksums) == count:
                    raise ValueError(
                        f"expected {count} records of {size} bytes for layer {layer}, "
                        f"got {record.nbytes} bytes after {len(checksums)} records"
                    )
                data = record.data
                checksums.append(
                    tuple(xxhash.xxh3_64_intdigest(data[p.offset : p.end]) for p in self._geometry.planes)
                )
                write_all(fd, data)
            if len(checksums) < count:
                raise ValueError(f"expected {count} records for layer {layer}, got {len(checksums)}")
            os.lseek(fd, 0, os.SEEK_SET)
            write_all(fd, _aligned(self._shard_header(layer, checksums, error)).data)
        self._errors[layer] = error
        self._layers[layer] = self._layer_records(layer, len(header), checksums)

    def write_dense(
        self, specs: Mapping[str, tuple[str, Sequence[int]]], tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Writes dense.safetensors. Holds one tensor at a time.

        Args:
            specs: name -> (safetensors' dtype, shape), in the order of the file.
            tensors: (name, tensor) in the same order; in the spec's shape and element type.

        Raises:
            ValueError: the tensors are not those of specs; nothing is written then.
            DoesNotFit: the disk is full.
        """
        header = header_bytes(specs, {"format": "pt"})
        expected = [
            (name, tensor_bytes(dtype, shape), tuple(shape)) for name, (dtype, shape) in specs.items()
        ]
        announced = iter(expected)
        digest = xxhash.xxh3_64(header)
        total = len(header) + sum(nbytes for _, nbytes, _ in expected)
        with replacing(self._directory / DENSE_NAME, total) as fd:
            write_all(fd, header)
            for name, tensor in tensors:
                raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
                got = (name, raw.nbytes, tuple(tensor.shape))
                if got != (wanted := next(announced, None)):
                    raise ValueError(f"expected the tensor {wanted} (name, bytes, shape), got {got}")
                digest.update(raw)
                write_all(fd, raw)
            if missing := next(announced, None):
                raise ValueError(f"expected the tensor {missing} (name, bytes, shape), got no more tensors")
        self._files[DENSE_NAME] = FileEntry(total, digest.intdigest())

    def copy(self, path: Path) -> None:
        """Copies a small file (config, tokenizer, chat template) into the store, under its own name."""
        raw = read_whole(path)
        with replacing(self._directory / path.name, len(raw)) as fd:
            write_all(fd, raw)
        self._files[path.name] = FileEntry(len(raw), xxhash.xxh3_64_intdigest(raw))

    def finish(self, source_format: str = "") -> Manifest:
        """Writes store.json, which makes the directory a store. Everything else must have been written.

        Args:
            source_format: what the source's weights were stored as, for people.
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
        )
        marker = self._directory / MARKER_NAME
        manifest.save(marker)
        # The marker becomes the manifest: at no moment are both there, or neither.
        final = self._directory / MANIFEST_NAME
        try:
            marker.replace(final)
            sync_directory(self._directory)
        except OSError as error:
            raise refused(final, len(manifest.to_json()), error) from error
        return manifest

    def _claim(self) -> None:
        """Makes sure that the directory is ours to write, and marks it so."""
        for name in (MANIFEST_NAME, MARKER_NAME):
            path = self._directory / name
            if path.exists():
                found = Manifest.read(path)
                if replace(found, layers={}, files={}, source_format="", source_error=None) != self._empty:
                    raise self._occupied(_difference(found, self._empty))
                return
        strangers = sorted(p.name for p in self._directory.iterdir() if not p.name.endswith(PARTIAL))
        if strangers:
            raise self._occupied(f"{strangers[0]} and no unfinished conversion")
        self._empty.save(self._directory / MARKER_NAME)

    def _occupied(self, found: str) -> UserError:
        return UserError(
            f"{self._directory} free for this store", found, "choose another directory, or remove this one"
        )

    def _complete_layers(self) -> dict[int, LayerRecords]:
        out = {}
        for path in self._directory.iterdir():
            if match := _SHARD_NAME.fullmatch(path.name):
                try:
                    out[int(match[1])] = self._read_layer(int(match[1]), path)
                except DamagedData:
                    continue  # not a file that this class left: the layer is written anew
        return out

    def _read_layer(self, layer: int, path: Path) -> LayerRecords:
        """What a layer's file says of itself, if it says exactly what write_layer makes it say."""
        header = read_header(path)
        digits = header.metadata.get(CHECKSUMS_KEY, "")
        planes, count = len(self._geometry.planes), len(header.tensors)
        if not re.fullmatch(rf"[0-9a-f]{{{16 * planes * count}}}", digits, re.ASCII):
            raise BadHeader(
                f"checksums of {count} records in {path}", "other metadata", "convert the model again"
            )
        try:
            error = SourceError.from_digits(header.metadata.get(ERROR_KEY, ""))
        except ValueError as found:
            raise BadHeader(
                f"the error of layer {layer} in {path}", str(found), "convert the model again"
            ) from found
        numbers = [int(digits[i : i + 16], 16) for i in range(0, len(digits), 16)]
        checksums = [tuple(numbers[i : i + planes]) for i in range(0, len(numbers), planes)]
        ours = self._shard_header(layer, checksums, error)
        with path.open("rb") as file:
            if file.read(len(ours)) != ours:
                raise BadHeader(
                    f"the records of layer {layer} in {path}", "other records", "convert the model again"
                )
        self._errors[layer] = error
        return self._layer_records(layer, len(ours), checksums)

    def _layer_records(
        self, layer: int, data_start: int, checksums: Sequence[tuple[int, ...]]
    ) -> LayerRecords:
        size = self._geometry.record_bytes
        records = (RecordEntry(data_start + e * size, sums) for e, sums in enumerate(checksums))
        return LayerRecords(shard_name(layer), tuple(records))

    def _shard_header(self, layer: int, checksums: Sequence[tuple[int, ...]], error: SourceError) -> bytes:
        """Equally long whatever checksums and error are, so that it can be written before they are known."""
        digits = "".join(f"{checksum:016x}" for sums in checksums for checksum in sums)
        shape = (self._geometry.record_bytes,)
        tensors = {tensor_name(layer, expert): ("U8", shape) for expert in range(len(checksums))}
        return header_bytes(tensors, {CHECKSUMS_KEY: digits, ERROR_KEY: error.to_digits()}, BLOCK)


def _aligned(raw: bytes) -> Bytes:
    out = aligned(len(raw))
    out[:] = np.frombuffer(raw, np.uint8)
    return out


def _difference(found: Manifest, wanted: Manifest) -> str:
    """Names the first thing in which two conversions differ."""
    for name in ("source", "layout", "dense_bits", "max_level", "geometry"):
        theirs, ours = getattr(found, name), getattr(wanted, name)
        if theirs != ours:
            return f"a conversion with {name} {theirs}, not {ours}"
    return "another conversion"
