"""A checkpoint on the Hub that is converted while its shards pass through: one of them on disk at a time.

Every shard is first a stand-in: a sparse file of its size with its own header and both its ends, fetched by
range, so that a checkpoint can be opened, checked and fingerprinted before any of it is downloaded. A shard
that is needed takes its stand-in's place. When the next one is needed, the shard becomes a stand-in again in
which only the tensors that are still to be read have their bytes: those of a layer that goes on in the next
shard, and dense ones, which a store takes last. Names and offsets never change, so that whoever reads the
checkpoint sees nothing of this.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from edgemoe.hub.repository import HubRepository, RemoteFile
from storage.atomic import replacing, write_all
from storage.base import ByteRange
from storage.errors import BadHeader
from storage.header import HEADER_LIMIT, Header, read_header

STATE = ".edgemoe"
"""Directory inside the checkpoint's for what is neither the checkpoint's nor anyone else's business."""

ENDS = 1 << 16
"""Bytes kept of a shard's data at each end: what a checkpoint's fingerprint is made of."""

_FIRST = 1 << 20
"""Bytes of a shard's start that are asked for at once; most headers fit."""

_PIECE = 1 << 22


class PassingShards:
    """Implements storage.convert.Arrivals. Used by one thread.

    Args:
        directory: the checkpoint's; its small files are there.
        repository: where the shards are.
        files: the shards, in the order of their names.
        keep: shards stay whole.
        progress: called with bytes that were downloaded.

    Raises:
        UserError, BadHeader: a shard's header cannot be had, or lies.
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
        (directory / STATE).mkdir(exist_ok=True)
        self._shards = [_Shard(directory, file) for file in files]
        for shard in self._shards:
            shard.prepare(repository)
            if set(shard.header.tensors) <= shard.here:
                progress(shard.file.size)
        self._needed = {name for shard in self._shards for name in shard.header.tensors}

    @property
    def peak_bytes(self) -> int:
        """See Arrivals: the largest shard that is still to come, or all of them if they are kept."""
        lacking = [s.file.size for s in self._shards if not set(s.header.tensors) & self._needed <= s.here]
        return sum(lacking) if self._keep else max(lacking, default=0)

    def require(self, layer: int | None) -> None:
        """See Arrivals. Downloads what is lacking, one shard after another.

        Raises:
            UserError, DoesNotFit, DamagedData: as HubRepository.download.
        """
        for shard in self._shards:
            wanted = {n for n in shard.header.tensors if layer is None or layer_of(n) == layer} & self._needed
            if not wanted <= shard.here:
                for other in self._shards:
                    self._thin(other)
                shard.fetch(self._repository, self._progress)

    def release(self, layer: int, keep: Collection[str]) -> None:
        """See Arrivals. A shard of which only dense tensors are still needed gives up the rest at once."""
        kept = set(keep)
        self._needed -= {name for name in self._needed if layer_of(name) == layer} - kept
        for shard in self._shards:
            if not (set(shard.header.tensors) & self._needed) - kept:
                self._thin(shard)

    def complete(self) -> None:
        """Downloads every shard of which anything is lacking, needed by a conversion or not.

        Raises:
            as require.
        """
        for shard in self._shards:
            if not set(shard.header.tensors) <= shard.here:
                shard.fetch(self._repository, self._progress)

    def _thin(self, shard: _Shard) -> None:
        if not self._keep and shard.here - self._needed:
            shard.thin(self._needed)


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to: the first number in its name. None where there is none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


class _Shard:
    """One file, and which of its tensors have their bytes.

    Attributes:
        file: as on the Hub.
        header: once `prepare` was called.
        here: names of tensors that can be read. Noted on disk before they go, and after they have come.
    """

    header: Header

    def __init__(self, directory: Path, file: RemoteFile) -> None:
        self.file = file
        self._path = directory / file.name
        self._note = directory / STATE / f"{file.name}.here.json"
        self._part = directory / STATE / f"{file.name}.part"
        self.here: set[str] = set()

    def prepare(self, repository: HubRepository) -> None:
        """Makes sure that at least a stand-in is there, and reads its header."""
        if not (self._path.exists() and self._path.stat().st_size == self.file.size):
            head = _head(repository, self.file)
            tail = max(self.file.size - ENDS, len(head))
            ends = [(0, head), (tail, repository.read(self.file, tail, self.file.size))]
            self._note.unlink(missing_ok=True)
            self._replace(ends)
        self.header = read_header(self._path)
        if self._note.exists():
            with suppress(ValueError, TypeError):  # a note that is damaged vouches for nothing
                self.here = set(json.loads(self._note.read_bytes())) & set(self.header.tensors)

    def fetch(self, repository: HubRepository, progress: Callable[[int], None]) -> None:
        """Downloads the whole file, or what an interrupted download left of it to do."""
        repository.download(self.file, self._part, progress)
        with self._part.open("rb") as part:
            os.fsync(part.fileno())
        self._part.replace(self._path)
        self.header = read_header(self._path)
        self._write_note(set(self.header.tensors))

    def thin(self, names: Collection[str]) -> None:
        """Gives up every tensor that is not in `names`, and the disk it took."""
        kept = sorted(self.header.tensors[name].range for name in self.here.intersection(names))
        head = ByteRange(0, min(self.header.data_start + ENDS, self.file.size))
        tail = ByteRange(max(self.file.size - ENDS, 0), min(ENDS, self.file.size))
        self._write_note(self.here.intersection(names))
        with self._path.open("rb") as source:
            self._replace((span.offset, _pieces(source.fileno(), span)) for span in (head, *kept, tail))

    def _replace(self, spans: Iterable[tuple[int, bytes | Iterable[bytes]]]) -> None:
        """Makes the file anew: holes, but for what `spans` say lies at their offsets."""
        with replacing(self._path, 0) as fd:
            for offset, data in spans:
                os.lseek(fd, offset, os.SEEK_SET)
                for piece in (data,) if isinstance(data, bytes) else data:
                    write_all(fd, piece)
            os.ftruncate(fd, self.file.size)

    def _write_note(self, here: set[str]) -> None:
        raw = json.dumps(sorted(here)).encode()
        with replacing(self._note, len(raw)) as fd:
            write_all(fd, raw)
        self.here = here


def _pieces(fd: int, span: ByteRange) -> Iterable[bytes]:
    for offset in range(span.offset, span.end, _PIECE):
        yield os.pread(fd, min(_PIECE, span.end - offset), offset)


def _head(repository: HubRepository, file: RemoteFile) -> bytes:
    """A shard's header and the first ENDS bytes after it."""
    raw = repository.read(file, 0, min(_FIRST, file.size))
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or length > min(HEADER_LIMIT, file.size - 8):
        raise BadHeader(
            f"a safetensors header was wanted in {file.name} of {repository.model.name}",
            f"it claims {length} bytes of header in a file of {file.size}",
            "Choose another revision",
        )
    end = min(8 + length + ENDS, file.size)
    return raw[:end] + repository.read(file, len(raw), end)
