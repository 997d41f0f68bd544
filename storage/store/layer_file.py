"""The file of a layer's records: its name, its header, and the checksums and the error in its metadata."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from edgemoe.errors import DamagedData
from edgemoe.storage.base import BLOCK
from edgemoe.storage.convert.source_error import SourceError
from edgemoe.storage.files.header import header_bytes, read_header
from edgemoe.storage.files.retry import open_regular
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.store.manifest_entries import LayerRecords, RecordEntry, tensor_name

CHECKSUMS_KEY = "xxh3_64"
"""Key in a layer file's metadata: 16 hex digits per plane, in the order of records and planes."""

ERROR_KEY = "source_error"
"""Key in a layer file's metadata: the result of SourceError.to_digits."""

_SHARD_NAME = re.compile(r"experts-(\d{5,})\.safetensors", re.ASCII)


def shard_name(layer: int) -> str:
    """Name of the file of a layer's records."""
    return f"experts-{layer:05d}.safetensors"


def complete_layers(directory: Path, geometry: RecordGeometry) -> dict[int, tuple[LayerRecords, SourceError]]:
    """The layers whose files are complete: their records, and their errors against their source."""
    out = {}
    for path in directory.iterdir():
        if match := _SHARD_NAME.fullmatch(path.name):
            # A file of another origin is an error: its layer is written again.
            with suppress(DamagedData, ValueError):
                out[int(match[1])] = _read_layer(path, int(match[1]), geometry)
    return out


def _read_layer(path: Path, layer: int, geometry: RecordGeometry) -> tuple[LayerRecords, SourceError]:
    """Reads a layer's records, and its error against its source, from the file's header.

    Raises:
        DamagedData, ValueError: the header is not one that StoreWriter.write_layer writes.
    """
    header = read_header(path)
    digits = header.metadata.get(CHECKSUMS_KEY, "")
    planes, count = len(geometry.planes), len(header.tensors)
    if not re.fullmatch(rf"[0-9a-f]{{{16 * planes * count}}}", digits, re.ASCII):
        raise ValueError(f"other metadata than checksums of {count} records in {path}")
    error = SourceError.from_digits(header.metadata.get(ERROR_KEY, ""))
    numbers = [int(digits[i : i + 16], 16) for i in range(0, len(digits), 16)]
    checksums = [tuple(numbers[i : i + planes]) for i in range(0, len(numbers), planes)]
    ours = shard_header(layer, geometry, checksums, error)
    with open_regular(path) as file:
        if file.read(len(ours)) != ours:
            raise ValueError(f"other records than those of layer {layer} in {path}")
    return layer_records(layer, geometry, checksums, len(ours)), error


def layer_records(
    layer: int, geometry: RecordGeometry, checksums: Sequence[tuple[int, ...]], start: int
) -> LayerRecords:
    """The entries of a layer's records, which follow a header of `start` bytes."""
    size = geometry.record_bytes
    records = (RecordEntry(start + e * size, sums) for e, sums in enumerate(checksums))
    return LayerRecords(shard_name(layer), tuple(records))


def shard_header(
    layer: int, geometry: RecordGeometry, checksums: Sequence[tuple[int, ...]], error: SourceError
) -> bytes:
    """Builds a header whose length does not depend on checksums and error, so that it is written before them."""
    digits = "".join(f"{checksum:016x}" for sums in checksums for checksum in sums)
    shape = (geometry.record_bytes,)
    tensors = {tensor_name(layer, expert): ("U8", shape) for expert in range(len(checksums))}
    return header_bytes(tensors, {CHECKSUMS_KEY: digits, ERROR_KEY: error.to_digits()}, BLOCK)
