"""The directory that an export writes: whole files with checksums, a marker until the end, then a list of contents.

    unfinished-export.json    while files are missing
    export.json               once all are there

Both hold what is exported and, of every complete file, its regions (storage/export/sink.py) with their checksums.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import xxhash

from edgemoe.errors import BadManifest, ChecksumMismatch, DamagedData, TruncatedFile, UserError
from edgemoe.storage.export.plan import Errors
from edgemoe.storage.export.sink import Sink
from edgemoe.storage.files.atomic import PARTIAL, refused, replacing, require_free, sync_directory, write_all
from edgemoe.storage.files.header import strict_json
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.files.retry import open_regular, read_errors

EXPORT_NAME = "export.json"
UNFINISHED_NAME = "unfinished-export.json"

_FORMAT = 1
_SIZE_LIMIT = 64 << 20
_PIECE = 1 << 20
_ACTION = "remove the directory and run `edgemoe export` again"


class ExportDirectory:
    """Writes an export, or the missing files of an unfinished one. A context manager; not thread-safe.

    Args:
        directory: new, empty, or an export of the same `content`, finished or not.
        content: the exported parts: texts by key, with the store's fingerprint, the format and the levels.
        layout: a digest of the files' names and sizes; an unfinished export of another one is refused.

    Raises:
        UserError: on entry: the directory holds other files, which are not changed.
        StoreBusy: on entry: another process uses the directory.
        DoesNotFit: from every method that writes: the disk is full.
    """

    def __init__(self, directory: Path, content: Mapping[str, Any], layout: str) -> None:
        self._directory, self._content = directory, {**content, "layout": layout}
        self._files: dict[str, list[list[Any]]] = {}
        self._notes: dict[str, dict[str, Any]] = {}
        self._lock: StoreLock | None = None
        self.finished = False

    def __enter__(self) -> ExportDirectory:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock = StoreLock(self._directory, exclusive=True)
        try:
            self._claim()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock:
            self._lock.close()

    def has(self, name: str) -> bool:
        """Whether a file is complete, from this or an earlier run."""
        path = self._directory / name
        sizes = [size for size, _ in self._files.get(name, ())]
        return bool(sizes) and path.is_file() and path.stat().st_size == sum(sizes)

    def note(self, name: str) -> dict[str, Any]:
        """The values that were given when a complete file was written."""
        return self._notes.get(name, {})

    def require_free(self, size: int) -> None:
        """Raises DoesNotFit if fewer than `size` bytes are free on the directory's disk."""
        require_free(self._directory / EXPORT_NAME, size)

    def write(self, name: str, sizes: Sequence[int], fill: Callable[[Sink], Mapping[str, Any]]) -> None:
        """Writes a file and records it in the marker.

        Args:
            name: the name of the file.
            sizes: bytes of its regions.
            fill: writes every region; returns values that a later run gets from the method `note`.
        """
        with replacing(self._directory / name, sum(sizes)) as fd:
            sink = Sink(fd, sizes)
            note = fill(sink)
            entries = sink.finish()
        self._files[name], self._notes[name] = entries, dict(note)
        self._save()

    def write_bytes(self, name: str, raw: bytes) -> None:
        """Writes a small file."""

        def fill(sink: Sink) -> dict[str, float]:
            sink.write(0, memoryview(raw))
            return {}

        self.write(name, [len(raw)], fill)

    def reopen(self) -> None:
        """Makes a finished export, of which a file is missing now, an unfinished one."""
        (self._directory / EXPORT_NAME).replace(self._directory / UNFINISHED_NAME)
        self.finished = False

    def finish(self) -> None:
        """Renames the marker to export.json, once all files are written."""
        final = self._directory / EXPORT_NAME
        try:
            (self._directory / UNFINISHED_NAME).replace(final)
            sync_directory(self._directory)
        except OSError as error:
            raise refused(final, 0, error) from error
        self.finished = True

    def _claim(self) -> None:
        """Checks that the directory is empty or holds this export, and writes the marker."""
        for name in (EXPORT_NAME, UNFINISHED_NAME):
            if (self._directory / name).exists():
                found = read_contents(self._directory / name)
                if found["content"] != self._content:
                    raise self._occupied(_difference(found["content"], self._content))
                self._files, self._notes = found["files"], found["notes"]
                self.finished = name == EXPORT_NAME
                for left in self._directory.glob(
                    f"*{PARTIAL}"
                ):  # of a killed run: their bytes are free again
                    left.unlink()
                return
        others = sorted(p.name for p in self._directory.iterdir() if not p.name.endswith(PARTIAL))
        if others:
            raise self._occupied(f"{others[0]} and no unfinished export")
        self._save()

    def _occupied(self, finding: str) -> UserError:
        return UserError(
            f"{self._directory} free for this export", finding, "choose another directory, or remove this one"
        )

    def _save(self) -> None:
        value = {"format": _FORMAT, "content": self._content, "files": self._files, "notes": self._notes}
        raw = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        with replacing(self._directory / UNFINISHED_NAME, len(raw)) as fd:
            write_all(fd, raw)


def read_contents(path: Path) -> dict[str, Any]:
    """Reads export.json, or the marker of an unfinished export.

    Returns:
        `content`, `files` (name -> [bytes, checksum] of every region) and `notes` (name -> values).

    Raises:
        BadManifest: the file cannot be read, or is not one that ExportDirectory writes.
    """
    try:
        with open_regular(path) as file:
            value = strict_json(file.read(_SIZE_LIMIT) or b"")
    except (OSError, ValueError) as error:
        raise BadManifest(f"a list of exported files in {path}", str(error)[:200], _ACTION) from error
    if not isinstance(value, dict) or value.get("format") != _FORMAT or not _is_list_of_files(value):
        raise BadManifest(f"a list of exported files in {path}", "other values", _ACTION)
    return value


def verify_export(directory: Path, progress: Callable[[int, int], None]) -> tuple[int, list[DamagedData]]:
    """Compares every file of a finished export with its checksums. Continues after damage.

    Args:
        directory: the directory of the export.
        progress: called with (bytes done, bytes in all).

    Returns:
        Bytes read, and an error for each file that differs.

    Raises:
        BadManifest: from read_contents.
        StoreBusy: another process is writing the export.
    """
    files = read_contents(directory / EXPORT_NAME)["files"]
    total = sum(size for regions in files.values() for size, _ in regions)
    damage: list[DamagedData] = []
    done = 0
    with StoreLock(directory, exclusive=False):
        for name, regions in sorted(files.items()):
            try:
                _check(directory / name, regions)
            except DamagedData as error:
                damage.append(error)
            done += sum(size for size, _ in regions)
            progress(done, total)
    return done, damage


def _check(path: Path, regions: Sequence[Sequence[Any]]) -> None:
    size = sum(size for size, _ in regions)
    with read_errors(f"{path}", _ACTION), open_regular(path) as file:
        if (found := os.fstat(file.fileno()).st_size) != size:
            raise TruncatedFile(f"{path} of {size} bytes", f"{found} bytes", _ACTION)
        for length, checksum in regions:
            start, left, digest = file.tell(), length, xxhash.xxh3_64()
            while left and (piece := file.read(min(left, _PIECE))):
                digest.update(piece)
                left -= len(piece)
            if digest.hexdigest() != checksum:
                wanted = f"checksum {checksum} for {length} bytes of {path} at offset {start}"
                raise ChecksumMismatch(wanted, digest.hexdigest(), _ACTION)


def _is_list_of_files(value: Mapping[str, Any]) -> bool:
    files = value.get("files")
    return (
        isinstance(value.get("content"), dict)
        and _are_notes(value.get("notes"))
        and isinstance(files, dict)
        and all(isinstance(regions, list) and all(map(_is_region, regions)) for regions in files.values())
        and not any("/" in name or name in ("", ".", "..") for name in files)
    )


def _are_notes(value: object) -> bool:
    names = {field.name for field in fields(Errors)}
    return isinstance(value, dict) and all(
        isinstance(note, dict) and {*note} <= names and all(type(n) in (int, float) for n in note.values())
        for note in value.values()
    )


def _is_region(value: object) -> bool:
    match value:
        case [int() as size, str() as checksum]:
            return type(size) is int and size >= 0 and len(checksum) == 16
    return False


def _difference(present: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Describes the first difference between two exports."""
    for key in content:
        if present.get(key) != content[key]:
            return f"an export with {key} {str(present.get(key))[:80]}, not {str(content[key])[:80]}"
    return "another export"
