"""Changes of a finished store's store.json: compensators, and experts or dense weights with other codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgemoe.storage.compensators.index import CompensatorIndex
from edgemoe.storage.files.atomic import replacing, write_all
from edgemoe.storage.files.header import strict_json
from edgemoe.storage.files.source_file import read_whole
from edgemoe.storage.store.codes import CalibratedCodes
from edgemoe.storage.store.manifest import (
    HEAD_NAME,
    MANIFEST_NAME,
    Manifest,
    files_json,
    is_dense_name,
    json_line,
)
from edgemoe.storage.store.manifest_entries import (
    FileEntry,
    LayerRecords,
    layer_json,
    read_object,
)
from edgemoe.storage.store.stored_head import StoredHead, head_json


def save_compensators(directory: Path, index: CompensatorIndex) -> Manifest:
    """Writes an index into the store.json of a store atomically; all else in it stays, also what is unknown here.

    Returns:
        the store's manifest with the index.

    Raises:
        UserError, BadManifest: as Manifest.load.
        DoesNotFit: the disk is full.
        WriteFailed: the operating system refused a write.
    """
    made = replace(Manifest.load(directory), compensators=index)
    _update(directory, {"compensators": index.to_json()})
    return made


def save_codes(
    directory: Path,
    codes: CalibratedCodes,
    layers: Mapping[int, LayerRecords],
    error: float | None,
    dense: Mapping[str, FileEntry],
) -> Manifest:
    """Replaces the experts in the store.json of a store atomically; compensators of other codes leave it.

    Args:
        directory: directory of the store.
        codes: how the new codes were chosen.
        layers: the records of every layer.
        error: `source_error` of the new codes.
        dense: a new file of dense weights, which replaces the present one; empty: that stays.

    Returns:
        the store's manifest with the new codes.

    Raises:
        EdgemoeError: as save_compensators.
    """
    found = Manifest.load(directory)
    files = found.files
    if dense:
        files = {name: entry for name, entry in files.items() if not is_dense_name(name)} | dict(dense)
    made = replace(found, codes=codes, layers=layers, files=files, source_error=error, compensators=None)
    numbered = {str(number): layer_json(layer) for number, layer in sorted(layers.items())}
    entries = {"codes": codes.to_json(), "layers": numbered, "source_error": error, "compensators": None}
    entries["files"] = files_json(files)
    _update(directory, entries)
    return made


def save_head(directory: Path, head: StoredHead, dense: FileEntry) -> Manifest:
    """Adds a head for further tokens, whose files are written, to the store.json of a store atomically.

    Args:
        directory: directory of the store.
        head: its experts.
        dense: the file of its dense weights.

    Returns:
        the store's manifest with the head.

    Raises:
        EdgemoeError: as save_compensators.
    """
    found = Manifest.load(directory)
    made = replace(found, head=head, files={**found.files, HEAD_NAME: dense})
    _update(directory, {"head": head_json(head), "files": files_json(made.files)})
    return made


def save_dense(directory: Path, manifest: Manifest) -> None:
    """Replaces the dense weights in the store.json of a store atomically, with their choice and the codes.

    Args:
        directory: directory of the store.
        manifest: the store's manifest with other dense weights.

    Raises:
        EdgemoeError: as save_compensators.
    """
    entries: dict[str, Any] = {"dense_bits": manifest.dense_bits, "files": files_json(manifest.files)}
    entries["codes"] = manifest.codes.to_json() if manifest.codes else None
    entries["dense_choice"] = manifest.dense_choice.to_json() if manifest.dense_choice else None
    _update(directory, entries)


def save_files(directory: Path, files: Mapping[str, FileEntry]) -> Manifest:
    """Adds files to the store.json of a store atomically.

    Returns:
        the store's manifest with them.

    Raises:
        EdgemoeError: as save_compensators.
    """
    found = Manifest.load(directory)
    made = replace(found, files=dict(found.files) | dict(files))
    _update(directory, {"files": files_json(made.files)})
    return made


def _update(directory: Path, entries: Mapping[str, Any]) -> None:
    """Replaces entries of store.json atomically, and removes entries whose value is None; all else in it stays."""
    path = directory / MANIFEST_NAME
    content = read_object(strict_json(read_whole(path)), "the manifest") | dict(entries)
    for name in [name for name, value in entries.items() if value is None]:
        content.pop(name, None)
    raw = json_line(content)
    with replacing(path, len(raw)) as fd:
        write_all(fd, raw)
