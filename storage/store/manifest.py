"""store.json: the contents of a store and their places. Written last: a directory without it is unfinished."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from edgemoe.errors import BadManifest, UserError
from edgemoe.storage.base import Plane
from edgemoe.storage.compensators.index import CompensatorIndex, read_compensators
from edgemoe.storage.files.atomic import replacing, write_all
from edgemoe.storage.files.header import strict_json
from edgemoe.storage.files.retry import open_regular
from edgemoe.storage.files.untrusted import shortened
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.record.probes import PROBES
from edgemoe.storage.store.codes import CalibratedCodes, read_codes
from edgemoe.storage.store.dense_choice import DenseChoice, read_dense_choice
from edgemoe.storage.store.manifest_entries import (
    MAX_OFFSET,
    FileEntry,
    LayerRecords,
    bits_json,
    layer_json,
    matrix_json,
    read_dense_bits,
    read_files,
    read_geometry,
    read_integer,
    read_layers,
    read_object,
    read_planes,
    read_text,
)
from edgemoe.storage.store.stored_head import StoredHead, head_json, read_head

if TYPE_CHECKING:
    from collections.abc import Mapping

MANIFEST_NAME = "store.json"
MARKER_NAME = "unfinished.json"
"""Name of the manifest without layers that marks a directory while a conversion writes to it."""

DENSE_NAME = "dense.safetensors"
_DENSE_NAMES = re.compile(r"dense(-[0-9a-f]{8})?\.safetensors", re.ASCII)
"""Name of the file of the weights outside the experts."""

HEAD_NAME = "head.safetensors"
"""Name of the file of the dense weights of a head that guesses further tokens."""

SCALE_SUFFIX = "_scale"
"""The scales of a tensor `name` of codes are the tensor `name` + this suffix."""

DENSE_BITS = (16, 8, 6, 5, 4)
"""Numbers of bits of a dense weight. At 4 some matrices have 8 (storage.store.dense)."""

FORMAT_VERSION = 3
"""The newest format of store.json. Format 2 has limits of matrices and layers, format 3 head_bits, format 1 neither."""

SIZE_LIMIT = 16 << 20
"""Most bytes of a manifest. A manifest of 60 layers of 384 experts takes 2 MB."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a store.

    Args:
        source: fingerprint of the checkpoint that the store was converted from.
        layout: name of the layout that records are packed in.
        probe: hash of a known matrix in that layout.
        geometry: sizes and planes of every record.
        dense_bits: bits per weight of the matrices in dense.safetensors, one of DENSE_BITS.
        layers: layer's number -> its experts; a layer without experts has no entry.
        files: every other file except the manifest, by name.
        source_format: format of the checkpoint's weights; empty if unknown.
        source_error: relative Frobenius error of the highest level against the source, over the first and the
            middle expert of every layer; None if unknown.
        compensators: the compensators of its experts; None without any.
        codes: how the experts' codes were chosen; None: rounded to nearest, or the source's own codes.
        dense_choice: the measurement that chose dense_bits; None: there was none.
        head_bits: bits per weight of embedding and head, one of HEAD_BITS, where dense_bits is below 16.
        head: the experts of the head that guesses further tokens, whose dense weights are the file HEAD_NAME; None: the
            store has no head.
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
    compensators: CompensatorIndex | None = None
    codes: CalibratedCodes | None = None
    dense_choice: DenseChoice | None = None
    head_bits: int = 8
    head: StoredHead | None = None

    @property
    def has_dense_codes(self) -> bool:
        """Whether dense weights are codes, which can be chosen with error feedback."""
        return self.dense_bits < 16

    @property
    def coded_source(self) -> str:
        """Identifies the experts' weights at every level: the checkpoint, and the run that calibrated the codes."""
        return f"{self.source}-{self.codes.run}" if self.codes else self.source

    @property
    def max_level(self) -> int:
        """The highest level in the records: 8, 4 or 2."""
        return self.geometry.max_level

    @property
    def dense_name(self) -> str:
        """Name of the file of the dense weights: DENSE_NAME, or one with the run that coded them again."""
        return next(filter(is_dense_name, self.files), DENSE_NAME)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all records."""
        return sum(
            len(layer.records) * self.geometry.of_layer(number).record_bytes
            for number, layer in self.layers.items()
        )

    @property
    def fingerprint(self) -> str:
        """Identifies the store, with or without compensators: a hash of every plane's checksum and of all else in
        store.json; 32 hex digits.
        """
        return xxhash.xxh3_128_hexdigest(replace(self, compensators=None).to_json())

    def to_json(self) -> bytes:
        """The bytes of store.json; equal manifests give equal bytes."""
        content = {
            "format": self.format,
            "source": self.source,
            "source_format": self.source_format,
            "source_error": self.source_error,
            "layout": self.layout,
            "probe": self.probe,
            "max_level": self.max_level,
            "dense_bits": self.dense_bits,
            "matrices": [matrix_json(matrix) for matrix in self.geometry.matrices],
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
            "files": files_json(self.files),
            "layers": {str(number): layer_json(layer) for number, layer in sorted(self.layers.items())},
        }
        if self.head_bits != 8:
            content["head_bits"] = self.head_bits
        if self.geometry.layers:
            content["bits"] = bits_json(self.geometry)
        if self.codes:
            content["codes"] = self.codes.to_json()
        if self.dense_choice:
            content["dense_choice"] = self.dense_choice.to_json()
        if self.compensators:
            content["compensators"] = self.compensators.to_json()
        if self.head:
            content["head"] = head_json(self.head)
        return json_line(content)

    @property
    def format(self) -> int:
        """The oldest format of store.json that can describe the store."""
        return 3 if self.head_bits != 8 else 2 if self.geometry.is_limited else 1

    def save(self, path: Path) -> None:
        """Writes the manifest to `path` atomically.

        Raises:
            DoesNotFit: the disk is full.
            WriteFailed: the operating system refused a write.
        """
        with replacing(path, len(raw := self.to_json())) as fd:
            write_all(fd, raw)

    @classmethod
    def load(cls, directory: Path) -> Manifest:
        """Reads the manifest of a finished store, and checks it as far as possible without its other files.

        Raises:
            UserError: the directory holds no finished store.
            BadManifest: store.json is invalid, contradicts itself or has a newer format.
        """
        path = directory / MANIFEST_NAME
        if path.is_file():
            return cls.read(path)
        if (directory / MARKER_NAME).is_file():
            found = f"an unfinished conversion without {MANIFEST_NAME}"
            action = "run `edgemoe convert` again to resume it"
        else:
            found = f"no {MANIFEST_NAME}"
            action = "give the directory that `edgemoe convert` wrote, or convert the model first"
        raise UserError(f"a store in {directory}", found, action)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Reads a manifest from a file of any name.

        Raises:
            BadManifest: the file cannot be read, is invalid, contradicts itself or has a newer format.
        """
        try:
            with open_regular(path) as file:
                raw = file.read(SIZE_LIMIT + 1)
            if len(raw) > SIZE_LIMIT:
                raise BadManifest(
                    f"at most {SIZE_LIMIT} bytes of {path}",
                    f"{path.stat().st_size} bytes",
                    "convert the model again",
                )
            return cls.parse(raw, path)
        except OSError as error:
            raise BadManifest(
                f"a manifest in {path}", str(error.strerror), "convert the model again"
            ) from error

    @classmethod
    def parse(cls, raw: bytes, path: Path) -> Manifest:
        """Parses what to_json returned. `path` names the bytes in messages.

        Raises:
            BadManifest: with the wrong value; no other error, whatever the bytes are.
        """
        try:
            return cls._checked(strict_json(raw))
        except (ValueError, RecursionError) as error:
            raise BadManifest(
                f"a valid store manifest in {path}",
                str(error)[:300],
                "use the edgemoe version that wrote it, or convert the model again",
            ) from error

    @classmethod
    def _checked(cls, value: object) -> Manifest:
        content = read_object(value, "the manifest")
        version = read_integer(content, "format", 1, MAX_OFFSET)
        if version > FORMAT_VERSION:
            raise ValueError(f"format {version}, above {FORMAT_VERSION}, the newest that this edgemoe reads")
        layout, of_probe = read_text(content, "layout"), read_text(content, "probe")
        if layout not in PROBES:
            raise ValueError(f"layout {shortened(layout)}, not one of {', '.join(PROBES)}")
        if of_probe != PROBES[layout]:
            raise ValueError(f"probe {shortened(of_probe)}, where layout {layout} gives {PROBES[layout]}")
        geometry = read_geometry(content)
        columns = read_planes(content, geometry)
        dense_bits, head_bits = read_dense_bits(content, DENSE_BITS)
        files, layers = read_files(content), read_layers(content, geometry, columns)
        head = read_head(content.get("head"), geometry, columns, layers)
        names = [layer.file for layer in (*layers.values(), *([head.experts] if head else ()))]
        if len({*names, *files}) < len(names) + len(files):
            raise ValueError("a file name that occurs twice")
        described = content.get("source_format", ""), content.get("source_error")
        if not isinstance(described[0], str) or not (described[1] is None or _is_error(described[1])):
            raise ValueError(f"source_format and source_error {shortened(described)}")
        counts = {number: len(layer.records) for number, layer in layers.items()}
        compensators = read_compensators(content.get("compensators"), geometry, counts)
        chosen = read_codes(content.get("codes")), read_dense_choice(content.get("dense_choice"))
        sizes = geometry, dense_bits, layers, files
        source = read_text(content, "source")
        return cls(source, layout, of_probe, *sizes, *described, compensators, *chosen, head_bits, head)


def is_dense_name(name: str) -> bool:
    """Whether a file of a store has dense weights, in use or not."""
    return _DENSE_NAMES.fullmatch(name) is not None


def files_json(files: Mapping[str, FileEntry]) -> dict[str, Any]:
    """The entry of the files without records, as values for JSON."""
    return {name: [entry.size, f"{entry.checksum:016x}"] for name, entry in sorted(files.items())}


def json_line(content: Mapping[str, Any]) -> bytes:
    """The bytes of a manifest with this content."""
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def _is_error(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
