"""The file of a layer's records: its name, its header, and the checksums and the error in its metadata."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from edgemoe.errors import DamagedData
from edgemoe.storage.base import BLOCK
from edgemoe.storage.convert.source_error import SourceError
from edgemoe.storage.files.header import header_bytes, read_header
from edgemoe.storage.files.retry import open_regular
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.record.planes import Bytes
from edgemoe.storage.store.manifest_entries import LayerRecords, RecordEntry, tensor_name
from edgemoe.storage.store.record_file import write_records

CHECKSUMS_KEY = "xxh3_64"
"""Key in a layer file's metadata: 16 hex digits per plane, in the order of records and planes."""

ERROR_KEY = "source_error"
"""Key in a layer file's metadata: the result of SourceError.to_digits."""

_SHARD_NAME = re.compile(r"experts-(?:([0-9a-f]{8})-)?(\d{5,})\.safetensors", re.ASCII)


def shard_name(layer: int, run: str = "") -> str:
    """Name of the file of a layer's records.

    >>> shard_name(3), shard_name(3, "0123abcd")
    ('experts-00003.safetensors', 'experts-0123abcd-00003.safetensors')

    Args:
        layer: number of the layer in the model.
        run: CalibratedCodes.run of the codes, 8 hex digits; "": codes that were rounded to nearest.
    """
    return f"experts-{run}-{layer:05d}.safetensors" if run else f"experts-{layer:05d}.safetensors"


def head_shard_name(layer: int) -> str:
    """Name of the file of the records of a head for further tokens, which is this layer."""
    return f"head-{layer:05d}.safetensors"


def shards(directory: Path) -> dict[Path, tuple[str, int]]:
    """The files of records in a directory, whole or not: path -> (run, layer), which shard_name takes."""
    found = ((path, _SHARD_NAME.fullmatch(path.name)) for path in directory.iterdir())
    return {path: (match[1] or "", int(match[2])) for path, match in found if match}


def complete_layers(
    directory: Path, geometry: RecordGeometry, run: str = ""
) -> dict[int, tuple[LayerRecords, SourceError]]:
    """The layers whose files of a run are complete: their records, and their errors against their source."""
    out = {}
    for path, (of_run, layer) in shards(directory).items():
        if of_run == run:
            # A file of another origin is an error: its layer is written again.
            with suppress(DamagedData, ValueError):
                out[layer] = _read_layer(path, layer, geometry.of_layer(layer))
    return out


def write_layer(
    directory: Path,
    layer: int,
    geometry: RecordGeometry,
    count: int,
    records: Iterable[Bytes],
    error: SourceError,
    run: str = "",
) -> LayerRecords:
    """Writes the file of a layer's records atomically, with one record in memory at a time.

    Args:
        directory: directory of the store.
        layer: number of the layer in the model.
        geometry: the geometry of the store.
        count: number of records, from expert 0 on.
        records: uint8 [record_bytes of the layer] each; BLOCK-aligned ones are written past the page cache.
        error: the error of the layer against its source; complete once the last record is taken.
        run: CalibratedCodes.run of the codes, 8 hex digits; "": codes that were rounded to nearest.

    Raises:
        ValueError: another number or length of records; no file is written.
        DoesNotFit: the disk is full.
    """
    return write_records_of(directory / shard_name(layer, run), layer, geometry, count, records, error)


def write_records_of(
    path: Path,
    layer: int,
    geometry: RecordGeometry,
    count: int,
    records: Iterable[Bytes],
    error: SourceError,
) -> LayerRecords:
    """Writes the records of a layer to a file of any name; other arguments and errors: see write_layer."""
    geometry = geometry.of_layer(layer)
    checksums = write_records(
        path,
        [geometry.record_bytes] * count,
        geometry.planes,
        records,
        lambda checksums: shard_header(layer, geometry, checksums, error),
    )
    return layer_records(path.name, geometry, checksums, len(shard_header(layer, geometry, checksums, error)))


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
            raise ValueError(f"records that do not belong to layer {layer} in {path}")
    return layer_records(path.name, geometry, checksums, len(ours)), error


def layer_records(
    file: str, geometry: RecordGeometry, checksums: Sequence[tuple[int, ...]], start: int
) -> LayerRecords:
    """The entries of the records in a file, which follow a header of `start` bytes."""
    size = geometry.record_bytes
    records = (RecordEntry(start + e * size, sums) for e, sums in enumerate(checksums))
    return LayerRecords(file, tuple(records))


def shard_header(
    layer: int, geometry: RecordGeometry, checksums: Sequence[tuple[int, ...]], error: SourceError
) -> bytes:
    """Builds a header whose length does not depend on checksums and error, so that it is written before them."""
    digits = "".join(f"{checksum:016x}" for sums in checksums for checksum in sums)
    shape = (geometry.record_bytes,)
    tensors = {tensor_name(layer, expert): ("U8", shape) for expert in range(len(checksums))}
    return header_bytes(tensors, {CHECKSUMS_KEY: digits, ERROR_KEY: error.to_digits()}, BLOCK)
