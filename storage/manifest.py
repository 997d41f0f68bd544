"""store.json: what a store holds and where, written last, so that a directory without it is unfinished."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from storage.atomic import replacing, write_all
from storage.base import Plane
from storage.errors import BadManifest, UserError
from storage.record import RecordGeometry

MANIFEST_NAME = "store.json"
MARKER_NAME = "unfinished.json"
"""A manifest without layers, there while a conversion goes on: what the directory is going to hold."""

FORMAT_VERSION = 1


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
    """Any other file of the store: bytes, and their xxh3_64."""

    size: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """What a store holds.

    Args:
        source: fingerprint of what it was converted from.
        layout: name of the layout that records are packed in.
        probe: that layout's hash of a known matrix.
        geometry: of every record; also says which planes there are.
        dense_bits: 16 or 8, of dense.safetensors' matrices.
        layers: by layer number; a layer without experts has no entry.
        files: every file but the manifest and the layers' own, by name.
        source_format: what the source's weights were stored as; empty if unknown.
        source_error: relative Frobenius error of the highest level against the source, over the first and the
            middle expert of every layer; None if it was not measured.
    """

    source: str
    layout: str
    probe: str
    geometry: RecordGeometry
    dense_bits: int
    layers: Mapping[int, LayerRecords]
    files: Mapping[str, FileEntry]
    source_format: str = ""
    source_error: float | None = None

    @property
    def max_level(self) -> int:
        """The highest level that the records hold: 8, 4 or 2."""
        return self.geometry.max_level

    @property
    def expert_bytes(self) -> int:
        """Bytes of all records."""
        return sum(len(layer.records) for layer in self.layers.values()) * self.geometry.record_bytes

    def to_json(self) -> bytes:
        """The manifest as it is on disk; equal manifests give equal bytes."""
        content = {
            "format": FORMAT_VERSION,
            "source": self.source,
            "source_format": self.source_format,
            "source_error": self.source_error,
            "layout": self.layout,
            "probe": self.probe,
            "max_level": self.max_level,
            "dense_bits": self.dense_bits,
            "matrices": [asdict(matrix) for matrix in self.geometry.matrices],
            "planes": [
                {
                    "name": Plane(i).label,
                    "requires": [Plane(j).label for j in range(i)],
                    "optional": False,
                    "offset": span.offset,
                    "length": span.length,
                }
                for i, span in enumerate(self.geometry.planes)
            ],
            "files": {name: [e.size, f"{e.checksum:016x}"] for name, e in sorted(self.files.items())},
            "layers": {str(number): _layer_json(layer) for number, layer in sorted(self.layers.items())},
        }
        return json.dumps(content, separators=(",", ":")).encode() + b"\n"

    def save(self, path: Path) -> None:
        """Writes to `path`, whole or not at all.

        Raises:
            DoesNotFit: the disk is full.
        """
        raw = self.to_json()
        with replacing(path, len(raw)) as fd:
            write_all(fd, raw)

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """The manifest of a finished store, checked as far as it can be without reading other files.

        Raises:
            UserError: there is no finished store in the directory.
            BadManifest: store.json cannot be believed, or is of a newer format; naming what is wrong in it.
        """
        path = directory / MANIFEST_NAME
        if path.is_file():
            return cls.read(path)
        unfinished = (directory / MARKER_NAME).is_file()
        raise UserError(
            f"a store in {directory}",
            f"an unfinished conversion without {MANIFEST_NAME}" if unfinished else f"no {MANIFEST_NAME}",
            "run `edgemoe convert` again to resume it"
            if unfinished
            else "give the directory that `edgemoe convert` wrote, or convert the model first",
        )

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest in a file of any name.

        Raises:
            BadManifest: as load.
        """
        # Here and not above: the check makes Manifests, so it has to import this module first.
        from storage.manifest_check import parse

        try:
            return parse(path.read_bytes(), path)
        except OSError as error:
            raise BadManifest(
                f"a manifest in {path}", str(error.strerror), "convert the model again"
            ) from error


def _layer_json(layer: LayerRecords) -> dict[str, Any]:
    records = [[r.offset, *(f"{checksum:016x}" for checksum in r.checksums)] for r in layer.records]
    return {"file": layer.file, "records": records}
