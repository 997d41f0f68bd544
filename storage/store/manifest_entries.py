"""The entries of store.json: their types, and readers that check type, bounds and agreement of every value.

Every function raises ValueError with the wrong value in its text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from edgemoe.storage.base import BLOCK, PLANES_OF_LEVEL, ByteRange, Plane
from edgemoe.storage.files.untrusted import shortened
from edgemoe.storage.record.offsets import BITS, MatrixSpec, RecordGeometry, align
from edgemoe.storage.store.dense_shapes import HEAD_BITS

MAX_OFFSET = 1 << 50
_MAX_SIDE = 1 << 24
MAX_LAYERS = 1 << 16
_MAX_EXPERTS = 1 << 16
_GROUPS = (32, 64, 128, 256)
_CHECKSUM = re.compile(r"[0-9a-f]{16}", re.ASCII)
_FILE_NAME = re.compile(r"(?!\.{1,2}$)[^/\\\x00-\x1f\ud800-\udfff]{1,200}")


def tensor_name(layer: int, expert: int) -> str:
    """Name of a record's tensor in its layer's file."""
    return f"experts.{layer}.{expert}"


@dataclass(frozen=True)
class RecordEntry:
    """One expert's record.

    Args:
        offset: bytes from the start of its file, a multiple of 4 KiB.
        checksums: xxh3_64 of every plane, in record order.
    """

    offset: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class LayerRecords:
    """One layer's experts: the name of their file, and their records by expert number."""

    file: str
    records: tuple[RecordEntry, ...]


@dataclass(frozen=True)
class FileEntry:
    """A file of the store without records: its bytes, and their xxh3_64."""

    size: int
    checksum: int


def read_geometry(content: Mapping[str, Any]) -> RecordGeometry:
    """The geometry of every record, from max_level and matrices."""
    max_level = read_integer(content, "max_level", 2, 8)
    if max_level not in PLANES_OF_LEVEL:
        raise ValueError(f"max_level {max_level}, not 8, 4 or 2")
    matrices = tuple(_matrix(value) for value in read_list(content.get("matrices"), "matrices"))
    if not matrices or len({m.name for m in matrices}) < len(matrices):
        raise ValueError("no matrices, or two with the same name")
    limits = [matrix.limit for matrix in matrices]
    if min(limits) < 8 and (max_level < 8 or max(limits) < 8):
        raise ValueError(f"limits {limits} of the matrices, where max_level is {max_level}")
    return RecordGeometry(matrices, max_level, _read_bits(content.get("bits"), matrices, max_level))


def _read_bits(
    value: object, matrices: tuple[MatrixSpec, ...], max_level: int
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The bits of each layer that has its own: layer -> matrix -> bits of its codes."""
    if value is None:
        return ()
    if max_level < 8:
        raise ValueError(f"bits of layers, where max_level is {max_level}")
    out = {}
    for number, entry in read_object(value, "bits").items():
        of_matrix = read_object(entry, f"bits of layer {shortened(number)}")
        if set(of_matrix) != {matrix.name for matrix in matrices}:
            raise ValueError(
                f"bits of {shortened([*of_matrix])} in layer {shortened(number)}, not of the matrices"
            )
        for matrix in matrices:
            bits = of_matrix[matrix.name]
            if type(bits) is not int or bits not in BITS or bits > matrix.limit:
                raise ValueError(
                    f"{shortened(bits)} bits of {matrix.name} in layer {shortened(number)}, not one of {BITS} up to "
                    f"{matrix.limit}"
                )
        out[_layer_number(number)] = tuple(of_matrix[matrix.name] for matrix in matrices)
    limits = tuple(matrix.limit for matrix in matrices)
    return tuple((layer, bits) for layer, bits in sorted(out.items()) if bits != limits)


def bits_json(geometry: RecordGeometry) -> dict[str, dict[str, int]]:
    """The entry that _read_bits reads, as values for JSON."""
    names = [matrix.name for matrix in geometry.matrices]
    return {str(layer): dict(zip(names, bits, strict=True)) for layer, bits in geometry.layers}


def matrix_json(matrix: MatrixSpec) -> dict[str, Any]:
    """The entry of a matrix, as values for JSON."""
    content = asdict(matrix)
    if matrix.limit == 8:
        del content["limit"]
    return content


def _matrix(value: object) -> MatrixSpec:
    content = read_object(value, "a matrix")
    sizes = {
        key: read_integer(content, key, 1, _MAX_SIDE)
        for key in ("rows", "cols", "group", "padded_rows", "padded_cols")
    }
    limit = read_integer(content, "limit", 4, 8) if "limit" in content else 8
    if limit not in (4, 8):
        raise ValueError(f"limit {limit} of a matrix, not 8 or 4")
    spec = MatrixSpec(read_text(content, "name"), **sizes, limit=limit)
    if spec.group not in _GROUPS:
        raise ValueError(f"groups of {spec.group} in matrix {shortened(spec.name)}, not one of {_GROUPS}")
    if (spec.padded_rows, spec.padded_cols) != (align(spec.rows, 16), align(spec.cols, spec.group)):
        raise ValueError(
            f"matrix {shortened(spec.name)} without padding to 16 rows and whole groups: {sizes}"
        )
    return spec


def read_planes(content: Mapping[str, Any], geometry: RecordGeometry) -> tuple[int, int]:
    """Checks the planes against the geometry.

    Returns:
        The number of planes that this edgemoe reads, and the number of checksums of a record.
    """
    expected = [Plane(i).label for i in range(len(geometry.planes))]
    planes = [read_object(value, "a plane") for value in read_list(content.get("planes"), "planes")]
    names = [read_text(plane, "name") for plane in planes]
    if names[: len(expected)] != expected:
        raise ValueError(f"planes {shortened(names)}, where max_level {geometry.max_level} has {expected}")
    for index, plane in enumerate(planes):
        span = ByteRange(
            read_integer(plane, "offset", 0, MAX_OFFSET), read_integer(plane, "length", 0, MAX_OFFSET)
        )
        requires = [text for text in read_list(plane.get("requires"), "requires") if isinstance(text, str)]
        if not isinstance(plane.get("optional"), bool):
            raise ValueError(f"plane {shortened(names[index])} without a boolean `optional`")
        if index < len(expected):
            if span != geometry.planes[index] or requires != expected[:index]:
                raise ValueError(
                    f"plane {names[index]} as {shortened(plane)}, where the matrices give {geometry.planes[index]}"
                )
        elif not plane["optional"]:
            raise ValueError(f"plane {shortened(names[index])}, unknown to this edgemoe and not optional")
        elif span.offset < geometry.record_bytes:
            raise ValueError(f"plane {shortened(names[index])} at {span.offset}, inside the planes before it")
    return len(expected), len(planes)


def read_layers(
    content: Mapping[str, Any], geometry: RecordGeometry, columns: tuple[int, int]
) -> dict[int, LayerRecords]:
    """The layers by number. `columns` are the two numbers of read_planes."""
    out = {}
    for name, value in read_object(content.get("layers"), "layers").items():
        number = _layer_number(name)
        out[number] = read_layer(number, value, geometry, columns)
    if out and (unknown := geometry.layer_numbers - out.keys()):
        raise ValueError(f"bits of layer {min(unknown)}, which has no experts")
    return out


def read_layer(
    number: int, value: object, geometry: RecordGeometry, columns: tuple[int, int]
) -> LayerRecords:
    """The entry of one layer."""
    own = geometry.of_layer(number)
    layer = read_object(value, f"layer {number}")
    rows = read_list(layer.get("records"), f"records of layer {number}")
    if not 1 <= len(rows) <= _MAX_EXPERTS:
        raise ValueError(f"{len(rows)} experts in layer {number}")
    missing = len(geometry.planes) - len(own.planes)
    of_layer = columns[0] - missing, columns[1] - missing
    records = tuple(_record(row, of_layer, f"layer {number}, expert {e}") for e, row in enumerate(rows))
    offsets = sorted(record.offset for record in records)
    if any(b - a < own.record_bytes for a, b in pairwise(offsets)):
        raise ValueError(f"two overlapping records in layer {number}")
    return LayerRecords(read_file_name(layer.get("file")), records)


def layer_json(layer: LayerRecords) -> dict[str, Any]:
    """The entry of a layer, as values for JSON."""
    records = [[r.offset, *(f"{checksum:016x}" for checksum in r.checksums)] for r in layer.records]
    return {"file": layer.file, "records": records}


def _layer_number(text: str) -> int:
    if not re.fullmatch(r"0|[1-9][0-9]{0,5}", text, re.ASCII) or int(text) >= MAX_LAYERS:
        raise ValueError(f"{shortened(text)} as a layer number")
    return int(text)


def _record(row: object, columns: tuple[int, int], label: str) -> RecordEntry:
    known, total = columns
    offset, *checksums = read_list(row, label) or [None]
    if type(offset) is not int or offset % BLOCK or not 0 <= offset <= MAX_OFFSET:
        raise ValueError(f"offset {shortened(offset)} for {label}")
    if len(checksums) != total:
        raise ValueError(f"{len(checksums)} checksums for the {total} planes of {label}")
    return RecordEntry(offset, tuple(read_checksum(text, label) for text in checksums)[:known])


def read_files(content: Mapping[str, Any]) -> dict[str, FileEntry]:
    """The files without records, by name."""
    files = read_object(content.get("files"), "files")
    return {read_file_name(name): _file_entry(entry, name) for name, entry in files.items()}


def _file_entry(value: object, name: str) -> FileEntry:
    match read_list(value, f"file {shortened(name)}"):
        case [int() as size, checksum] if type(size) is int and 0 <= size <= MAX_OFFSET:
            return FileEntry(size, read_checksum(checksum, name))
    raise ValueError(f"{shortened(value)} for file {shortened(name)}, not a size and a checksum")


def read_file_name(name: object) -> str:
    """The name of a file inside the store."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{shortened(name)} as a file name")
    return name


def read_checksum(text: object, label: str) -> int:
    """The checksum in 16 hex digits."""
    if not isinstance(text, str) or not _CHECKSUM.fullmatch(text):
        raise ValueError(f"checksum {shortened(text)} for {shortened(label)}")
    return int(text, 16)


def read_object(value: object, label: str) -> dict[str, Any]:
    """The object `value`; `label` names it in the error."""
    if not isinstance(value, dict):
        raise ValueError(f"{shortened(value)} as {label}, not an object")
    return value


def read_list(value: object, label: str) -> list[Any]:
    """The list `value`; `label` names it in the error."""
    if not isinstance(value, list):
        raise ValueError(f"{shortened(value)} as {shortened(label)}, not a list")
    return value


def read_text(content: Mapping[str, Any], key: str) -> str:
    """The text of 1 to 1000 characters at `key`."""
    value = content.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= 1000:
        raise ValueError(f"{key} {shortened(value)}, not a text")
    return value


def read_integer(content: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """The whole number from `low` to `high` at `key`."""
    value = content.get(key)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{key} {shortened(value)}, not a whole number from {low} to {high}")
    return value


def read_dense_bits(content: Mapping[str, Any], numbers: Sequence[int]) -> tuple[int, int]:
    """Reads dense_bits, one of some numbers, and head_bits, by default 8."""
    bits, head = read_integer(content, "dense_bits", 4, 16), 8
    if bits not in numbers:
        raise ValueError(f"dense_bits {bits}, not 16, 8, 6, 5 or 4")
    if "head_bits" in content:
        head = read_integer(content, "head_bits", 6, 8)
        if head not in HEAD_BITS or bits == 16:
            raise ValueError(f"head_bits {head} next to dense_bits {bits}, not 8 or 6 next to 8, 6, 5 or 4")
    return bits, head
