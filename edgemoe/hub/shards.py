"""Streams a checkpoint from the Hub through the disk while it is converted: one shard at a time.

Every shard begins as a stand-in: a sparse file of the shard's size with its header, fetched by range, so that a
checkpoint can be opened and checked before any shard is downloaded. A download
replaces the stand-in. When the next shard is needed, the previous one becomes a stand-in again and keeps only the
tensors that are still to be read: tensors of a layer that continues in the next shard, and dense tensors, which a
conversion reads last. Names and offsets never change, so the conversion reads an ordinary checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

from edgemoe.errors import BadHeader
from edgemoe.hub.gguf_files import gguf_head
from edgemoe.hub.repository import SHA256, HubRepository, RemoteFile
from edgemoe.storage.base import ByteRange
from edgemoe.storage.files.atomic import replacing, write_all
from edgemoe.storage.files.header import HEADER_LIMIT, read_header
from edgemoe.storage.files.retry import open_regular
from edgemoe.storage.formats.gguf_header import read_gguf_header

STATE = ".edgemoe"
"""Subdirectory of a checkpoint for the state of its download."""

_FIRST = 1 << 20
"""Bytes of the first request for a shard's header; most headers fit."""

_PIECE = 1 << 22
"""Bytes copied at a time."""


class StreamedShards:
    """Shards that are downloaded on demand. Implements storage.convert.run.Arrivals. For one thread.

    Args:
        directory: the directory of the checkpoint, with its small files.
        repository: the repository of the shards.
        files: the shards, ordered by name.
        keep: shards stay complete.
        progress: called with downloaded bytes.

    Raises:
        UserError, BadHeader: a shard's header cannot be read, or contradicts its file.
    """

    def __init__(
        self,
        directory: Path,
        repository: HubRepository,
        files: Sequence[RemoteFile],
        *,
        keep: bool,
        progress: Callable[[int], None],
    ) -> None:
        self._directory, self._repository, self._progress = directory, repository, progress
        self._keep = keep
        self._shards = [_Shard(directory, file) for file in files]
        for shard in self._shards:
            shard.prepare(repository)
            if shard.names <= shard.here:
                progress(shard.file.size)
        self._needed = {name for shard in self._shards for name in shard.names}

    def keep(self) -> None:
        """Keeps every shard complete from now on."""
        self._keep = True

    @property
    def peak_bytes(self) -> int:
        """Bytes of disk still needed: the largest missing shard, or all missing shards if they are kept."""
        missing = [s.file.size for s in self._shards if not s.names & self._needed <= s.here]
        return sum(missing) if self._keep else max(missing, default=0)

    @property
    def contents(self) -> dict[str, str]:
        """SHA-256 of the content of every shard, by name; where the Hub gives none, another hash or the commit."""
        commit = f"commit {self._repository.commit}"
        found = {Path(shard.file.name).name: shard.file.hash or ("", commit) for shard in self._shards}
        return {
            name: digits if kind == SHA256 else f"{kind} {digits}" for name, (kind, digits) in found.items()
        }

    def require(self, layer: int | None) -> None:
        """Downloads the missing shards of a layer, one after another; None: of every tensor not yet released.

        Raises:
            UserError, DoesNotFit, DamagedData: from HubRepository.download.
        """
        for shard in self._shards:
            needed = {n for n in shard.names if layer is None or layer_of(n) == layer} & self._needed
            if not needed <= shard.here:
                for other in self._shards:
                    self._thin(other)
                shard.fetch(self._repository, self._progress)

    def release(self, layer: int | None, keep: Collection[str]) -> None:
        """Frees the disk of a converted layer, except tensors in `keep`; at once where a shard has only such left.

        None: of all weights.
        """
        kept = set(keep)
        self._needed -= {name for name in self._needed if layer in (None, layer_of(name))} - kept
        for shard in self._shards:
            if not (shard.names & self._needed) - kept:
                self._thin(shard)

    def complete(self) -> None:
        """Downloads every incomplete shard, whether a conversion needs it or not.

        Raises:
            UserError, DoesNotFit, DamagedData: from HubRepository.download.
        """
        for shard in self._shards:
            if not shard.names <= shard.here:
                shard.fetch(self._repository, self._progress)

    def _thin(self, shard: _Shard) -> None:
        if not self._keep and shard.here - self._needed:
            shard.thin(self._needed)


def layer_of(name: str) -> int | None:
    """The layer of a tensor: the first number in its name, None without one."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


class _Shard:
    """One file of weights, and which of its tensors are on disk.

    Attributes:
        file: the file on the Hub; in the directory it has the last part of its name.
        here: names of readable tensors. Its record on disk shrinks before bytes go, and grows after bytes came.
    """

    def __init__(self, directory: Path, file: RemoteFile) -> None:
        self.file = file
        self._path = directory / Path(file.name).name
        self._record = directory / STATE / f"{self._path.name}.here.json"
        self._part = directory / STATE / f"{self._path.name}.part"
        self._ranges: dict[str, ByteRange] = {}
        self.here: set[str] = set()

    @property
    def names(self) -> set[str]:
        """Names of all its tensors, readable or not; `prepare` has read them."""
        return set(self._ranges)

    def prepare(self, repository: HubRepository) -> None:
        """Creates the stand-in if there is no file yet, and reads the header; a file of no tensors is downloaded."""
        if not (self._path.exists() and self._path.stat().st_size == self.file.size):
            head = _head(repository, self.file)
            self._record.unlink(missing_ok=True)
            self._replace([(0, [head])])
        self._ranges = _ranges(self._path)
        if self._record.exists():
            with suppress(ValueError, TypeError):  # a damaged record means that no tensor is readable
                self.here = set(json.loads(self._record.read_bytes())) & self.names
        elif not self._ranges:
            self.fetch(repository, lambda size: None)

    def fetch(self, repository: HubRepository, progress: Callable[[int], None]) -> None:
        """Downloads the whole file, resuming an interrupted download."""
        repository.download(self.file, self._part, progress)
        with self._part.open("rb") as part:
            os.fsync(part.fileno())
        self._part.replace(self._path)
        self._ranges = _ranges(self._path)
        self._write_record(self.names)

    def thin(self, names: Collection[str]) -> None:
        """Frees the disk of every tensor that is not in `names`."""
        kept = sorted(self._ranges[name] for name in self.here.intersection(names))
        start = min(span.offset for span in self._ranges.values())
        self._write_record(self.here.intersection(names))
        with open_regular(self._path) as source:
            self._replace((span.offset, _pieces(source, span)) for span in (ByteRange(0, start), *kept))

    def _replace(self, spans: Iterable[tuple[int, Iterable[bytes]]]) -> None:
        """Replaces the file by a sparse one with the data of `spans` (offset, pieces) and holes between them."""
        with replacing(self._path, 0) as fd:
            for offset, pieces in spans:
                os.lseek(fd, offset, os.SEEK_SET)
                for piece in pieces:
                    write_all(fd, piece)
            os.ftruncate(fd, self.file.size)

    def _write_record(self, here: set[str]) -> None:
        raw = json.dumps(sorted(here)).encode()
        with replacing(self._record, len(raw)) as fd:
            write_all(fd, raw)
        self.here = here


def _pieces(source: FileIO, span: ByteRange) -> Iterable[bytes]:
    source.seek(span.offset)
    for offset in range(span.offset, span.end, _PIECE):
        yield source.read(min(_PIECE, span.end - offset))


def _ranges(path: Path) -> dict[str, ByteRange]:
    """Reads the header of a shard: where each tensor lies in the file."""
    header = read_gguf_header(path) if path.suffix.lower() == ".gguf" else read_header(path)
    return {name: tensor.range for name, tensor in header.tensors.items()}


def _head(repository: HubRepository, file: RemoteFile) -> bytes:
    """Reads a shard's header."""
    if file.name.lower().endswith(".gguf"):
        raw, start = gguf_head(repository, file)
    else:
        raw, start = _safetensors_head(repository, file)
    return raw[:start] + repository.read(file, len(raw), start)


def _safetensors_head(repository: HubRepository, file: RemoteFile) -> tuple[bytes, int]:
    """Reads the first bytes of a shard; returns them, and the offset of its data."""
    raw = repository.read(file, 0, min(_FIRST, file.size))
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > min(HEADER_LIMIT, file.size - 8):
        raise BadHeader(
            f"a safetensors header in {file.name} of {repository.model.name}",
            f"{length} bytes of header in a file of {file.size}",
            "choose another revision",
        )
    return raw, 8 + length
