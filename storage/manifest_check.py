"""Reading store.json with distrust: every value's type and bounds, and that they agree with each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from storage.base import BLOCK, PLANES_OF_LEVEL, ByteRange, Plane
from storage.errors import BadManifest
from storage.header import strict_json
from storage.layout import LAYOUTS, probe
from storage.manifest import FORMAT_VERSION, FileEntry, LayerRecords, Manifest, RecordEntry
from storage.record import MatrixSpec, RecordGeometry, align
from storage.untrusted import shortened

_MAX_OFFSET = 1 << 50
_MAX_SIDE = 1 << 24
_MAX_LAYERS = 1 << 16
_MAX_EXPERTS = 1 << 16
_GROUPS = (32, 64, 128, 256)
_CHECKSUM = re.compile(r"[0-9a-f]{16}", re.ASCII)
_FILE_NAME = re.compile(r"(?!\.{1,2}$)[^/\\\x00-\x1f\ud800-\udfff]{1,200}")


def parse(raw: bytes, path: Path) -> Manifest:
    """A manifest from its bytes.

    Args:
        raw: as Manifest.to_json writes it.
        path: where it is from, for messages.

    Raises:
        BadManifest: saying what is wrong; nothing else, whatever the bytes.
    """
    try:
        return _manifest(strict_json(raw))
    except (ValueError, RecursionError) as error:
        raise BadManifest(
            f"a valid store manifest in {path}",
            str(error)[:300],
            "use the edgemoe version that wrote it, or convert the model again",
        ) from error


def _manifest(value: object) -> Manifest:
    content = _object(value, "the manifest")
    version = _integer(content, "format", 1, _MAX_OFFSET)
    if version > FORMAT_VERSION:
        raise ValueError(f"format {version}, above {FORMAT_VERSION}, the newest that this edgemoe reads")
    layout, of_probe = _text(content, "layout"), _text(content, "probe")
    if layout not in LAYOUTS:
        raise ValueError(f"layout {shortened(layout)}, not one of {', '.join(LAYOUTS)}")
    if of_probe != probe(layout):
        raise ValueError(f"probe {shortened(of_probe)}, where layout {layout} gives {probe(layout)}")
    geometry = _geometry(content)
    columns = _planes(content, geometry)
    dense_bits = _integer(content, "dense_bits", 8, 16)
    if dense_bits not in (8, 16):
        raise ValueError(f"dense_bits {dense_bits}, not 16 or 8")
    files = {
        _file(name): _file_entry(entry, name)
        for name, entry in _object(content.get("files"), "files").items()
    }
    layers = _layers(content, geometry, columns)
    names = [layer.file for layer in layers.values()]
    if len({*names, *files}) < len(names) + len(files):
        raise ValueError("a file name that occurs twice")
    described = content.get("source_format", ""), content.get("source_error")
    if not isinstance(described[0], str) or not (described[1] is None or _is_error(described[1])):
        raise ValueError(f"source_format and source_error {shortened(described)}")
    return Manifest(
        _text(content, "source"), layout, of_probe, geometry, dense_bits, layers, files, *described
    )


def _is_error(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _geometry(content: Mapping[str, Any]) -> RecordGeometry:
    max_level = _integer(content, "max_level", 2, 8)
    if max_level not in PLANES_OF_LEVEL:
        raise ValueError(f"max_level {max_level}, not 8, 4 or 2")
    matrices = tuple(_matrix(value) for value in _list(content.get("matrices"), "matrices"))
    if not matrices or len({m.name for m in matrices}) < len(matrices):
        raise ValueError("no matrices, or two with the same name")
    return RecordGeometry(matrices, max_level)


def _matrix(value: object) -> MatrixSpec:
    content = _object(value, "a matrix")
    sizes = {
        key: _integer(content, key, 1, _MAX_SIDE)
        for key in ("rows", "cols", "group", "padded_rows", "padded_cols")
    }
    spec = MatrixSpec(_text(content, "name"), **sizes)
    if spec.group not in _GROUPS:
        raise ValueError(f"groups of {spec.group} in matrix {shortened(spec.name)}, not one of {_GROUPS}")
    if (spec.padded_rows, spec.padded_cols) != (align(spec.rows, 16), align(spec.cols, spec.group)):
        raise ValueError(
            f"matrix {shortened(spec.name)} without padding to 16 rows and whole groups: {sizes}"
        )
    return spec


def _planes(content: Mapping[str, Any], geometry: RecordGeometry) -> tuple[int, int]:
    """Checks the planes against the geometry.

    Returns:
        how many planes are known, and how many checksums a record has.
    """
    expected = [Plane(i).label for i in range(len(geometry.planes))]
    planes = [_object(value, "a plane") for value in _list(content.get("planes"), "planes")]
    names = [_text(plane, "name") for plane in planes]
    if names[: len(expected)] != expected:
        raise ValueError(f"planes {shortened(names)}, where max_level {geometry.max_level} has {expected}")
    for index, plane in enumerate(planes):
        span = ByteRange(_integer(plane, "offset", 0, _MAX_OFFSET), _integer(plane, "length", 0, _MAX_OFFSET))
        requires = [text for text in _list(plane.get("requires"), "requires") if isinstance(text, str)]
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


def _layers(
    content: Mapping[str, Any], geometry: RecordGeometry, columns: tuple[int, int]
) -> dict[int, LayerRecords]:
    out = {}
    for number, value in _object(content.get("layers"), "layers").items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,5}", number, re.ASCII) or int(number) >= _MAX_LAYERS:
            raise ValueError(f"{shortened(number)} as a layer number")
        layer = _object(value, f"layer {number}")
        rows = _list(layer.get("records"), f"records of layer {number}")
        if not 1 <= len(rows) <= _MAX_EXPERTS:
            raise ValueError(f"{len(rows)} experts in layer {number}")
        records = tuple(_record(row, columns, f"layer {number}, expert {e}") for e, row in enumerate(rows))
        offsets = sorted(record.offset for record in records)
        if any(b - a < geometry.record_bytes for a, b in pairwise(offsets)):
            raise ValueError(f"two overlapping records in layer {number}")
        out[int(number)] = LayerRecords(_file(layer.get("file")), records)
    return out


def _record(row: object, columns: tuple[int, int], label: str) -> RecordEntry:
    known, total = columns
    offset, *checksums = _list(row, label) or [None]
    if type(offset) is not int or offset % BLOCK or not 0 <= offset <= _MAX_OFFSET:
        raise ValueError(f"offset {shortened(offset)} for {label}")
    if len(checksums) != total:
        raise ValueError(f"{len(checksums)} checksums for the {total} planes of {label}")
    return RecordEntry(offset, tuple(_checksum(text, label) for text in checksums)[:known])


def _file_entry(value: object, name: str) -> FileEntry:
    match _list(value, f"file {shortened(name)}"):
        case [int() as size, checksum] if type(size) is int and 0 <= size <= _MAX_OFFSET:
            return FileEntry(size, _checksum(checksum, name))
    raise ValueError(f"{shortened(value)} for file {shortened(name)}, not a size and a checksum")


def _file(name: object) -> str:
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{shortened(name)} as a file name")
    return name


def _checksum(text: object, label: str) -> int:
    if not isinstance(text, str) or not _CHECKSUM.fullmatch(text):
        raise ValueError(f"checksum {shortened(text)} for {shortened(label)}")
    return int(text, 16)


def _object(value: object, label: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{shortened(value)} as {label}, not an object")
    return value


def _list(value: object, label: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{shortened(value)} as {shortened(label)}, not a list")
    return value


def _text(content: Mapping[str, Any], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= 1000:
        raise ValueError(f"{key} {shortened(value)}, not a text")
    return value


def _integer(content: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = content.get(key)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{key} {shortened(value)}, not a whole number from {low} to {high}")
    return value
