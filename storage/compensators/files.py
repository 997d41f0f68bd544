"""The files of compensators: one for each layer, with its ranks and checksums in its own header."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from edgemoe.errors import DamagedData
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.compensators.geometry import CompensatorGeometry, Ranks
from edgemoe.storage.compensators.index import (
    FOLDER,
    CompensatorEntry,
    CompensatorIndex,
    LayerCompensators,
    compensator_name,
)
from edgemoe.storage.compensators.reader import CompensatorReader
from edgemoe.storage.convert.source_error import SourceError
from edgemoe.storage.files.atomic import require_free
from edgemoe.storage.files.header import header_bytes, read_header
from edgemoe.storage.files.retry import open_regular
from edgemoe.storage.record.planes import Bytes
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.record_file import write_records

_RUN, _RANKS, _CHECKSUMS, _ERROR = "run", "ranks", "xxh3_64", "error"
"""Keys in the metadata of a layer's file."""


@dataclass(frozen=True)
class CompensatorRun:
    """The settings of a run; equal settings write equal bytes.

    Args:
        store: fingerprint of the store.
        reference: fingerprint of the checkpoint with the weights, or "level 8": the store's own.
        base_level: level whose error is compensated, 2 or 4.
        rule: the rule that assigns ranks, one of RULES.
        mean_rank: mean over the projections of a layer, the budget of the rule.
    """

    store: str
    reference: str
    base_level: int
    rule: str
    mean_rank: int

    def file_name(self, layer: int) -> str:
        """Name of the file of a layer's compensators: the number of the layer and a hash of the run."""
        return f"{layer:05d}-{xxhash.xxh3_64_hexdigest(self.to_json().encode())[:8]}.safetensors"

    def to_json(self) -> str:
        """The run as JSON."""
        return json.dumps(asdict(self))


class CompensatorFiles:
    """The files of one run.

    Args:
        run: the settings of the run.
        directory: the directory of the store, or another one for the files.
        manifest: the store's manifest.
    """

    def __init__(self, run: CompensatorRun, directory: Path, manifest: Manifest) -> None:
        self._run, self._directory, self._geometry = run, directory, manifest.geometry
        self._counts = {layer: len(found.records) for layer, found in manifest.layers.items()}

    def require_free(self, layers: Sequence[int]) -> None:
        """Raises DoesNotFit if the disk has too little space for the files of these layers."""
        mean, count = self._run.mean_rank, sum(self._counts[layer] for layer in layers)
        require_free(self._path(0), count * self._shape((mean, mean, mean)).nbytes)

    def write(
        self, layer: int, ranks: Sequence[Ranks], records: Iterable[Bytes], error: SourceError
    ) -> LayerCompensators:
        """Writes a layer's file.

        Args:
            layer: its number.
            ranks: the ranks of every expert.
            records: uint8 [bytes of its ranks] for each expert, BLOCK-aligned.
            error: the squared error that the compensators leave; complete once the last record is taken.

        Raises:
            DoesNotFit, WriteFailed: the disk is full, or refuses a write.
        """
        sizes = [self._shape(each).nbytes for each in ranks]
        checksums = write_records(
            self._path(layer), sizes, None, records, lambda sums: self._header(layer, ranks, sums, error)
        )
        return self._entries(layer, ranks, checksums, error)

    def finished(self, layer: int) -> tuple[LayerCompensators, SourceError] | None:
        """The compensators of a layer that an earlier call has written whole, and what they leave of the error."""
        with suppress(DamagedData, ValueError):
            found, error = self._read_layer(layer)
            index = CompensatorIndex(self._run.base_level, self._run.rule, 1, "", 0, {layer: found})
            with CompensatorReader(self._directory, index) as reader:
                for expert in range(self._counts[layer]):
                    reader.load(ExpertKey(layer, expert))
            return found, error
        return None

    def hold(self, index: CompensatorIndex) -> bool:
        """Whether the files have all compensators of an index, whole: every one is read."""
        return all(
            (found := self.finished(layer)) and found[0] == entries for layer, entries in index.layers.items()
        )

    def _read_layer(self, layer: int) -> tuple[LayerCompensators, SourceError]:
        """Reads a layer's index from its file.

        Raises:
            DamagedData, ValueError: the header is not one that _write_layer writes.
        """
        path = self._path(layer)
        metadata = read_header(path).metadata
        error = SourceError.from_digits(metadata.get(_ERROR, ""))
        digits, numbers = metadata.get(_CHECKSUMS, ""), metadata.get(_RANKS, "").split()
        count = self._counts[layer]
        if not re.fullmatch(rf"[0-9a-f]{{{16 * count}}}", digits, re.ASCII) or len(numbers) != 3 * count:
            raise ValueError(f"metadata that do not describe {count} compensators in {path}")
        flat = [int(number) for number in numbers]
        ranks: list[Ranks] = [(flat[i], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
        checksums = [(int(digits[i : i + 16], 16),) for i in range(0, len(digits), 16)]
        ours = self._header(layer, ranks, checksums, error)
        with open_regular(path) as file:
            if file.read(len(ours)) != ours:
                raise ValueError(f"compensators that do not belong to layer {layer} in {path}")
        return self._entries(layer, ranks, checksums, error), error

    def _header(
        self, layer: int, ranks: Sequence[Ranks], checksums: Sequence[tuple[int, ...]], error: SourceError
    ) -> bytes:
        """The start of a layer's file; its length does not depend on checksums and error."""
        metadata = {
            _RUN: self._run.to_json(),
            _RANKS: " ".join(str(rank) for each in ranks for rank in each),
            _CHECKSUMS: "".join(f"{checksum:016x}" for (checksum,) in checksums),
            _ERROR: error.to_digits(),
        }
        sizes = (self._shape(each).nbytes for each in ranks)
        return header_bytes({compensator_name(layer, e): ("U8", (n,)) for e, n in enumerate(sizes)}, metadata)

    def _entries(
        self, layer: int, ranks: Sequence[Ranks], checksums: Sequence[tuple[int, ...]], error: SourceError
    ) -> LayerCompensators:
        at, entries = len(self._header(layer, ranks, checksums, error)), []
        for each, (checksum,) in zip(ranks, checksums, strict=True):
            entries.append(CompensatorEntry(at, self._shape(each).nbytes, each, checksum))
            at = entries[-1].offset + entries[-1].length
        return LayerCompensators(self._run.file_name(layer), tuple(entries))

    def _shape(self, ranks: Ranks) -> CompensatorGeometry:
        return CompensatorGeometry.of(self._geometry, ranks)

    def _path(self, layer: int) -> Path:
        return self._directory / FOLDER / self._run.file_name(layer)
