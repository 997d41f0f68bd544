"""GGUF files of a repository on the Hub: the choice of one model, and its header, read by ranges."""

from __future__ import annotations

import re
from collections.abc import Collection
from io import SEEK_CUR, SEEK_END, BufferedReader, RawIOBase
from pathlib import Path
from typing import Any

from edgemoe.errors import ModelRefused
from edgemoe.hub.name import HubModel
from edgemoe.hub.repository import HubRepository, RemoteFile
from edgemoe.storage.convert.gguf_parts import part_names
from edgemoe.storage.formats.gguf_header import parse_gguf_header

DEFAULT = "Q4_K_M"
"""Quantization of a model that is named without one, where the repository has it."""

_PIECE = 4 << 20
"""Bytes of a request for a header; most headers take two."""

_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)*[A-Za-z0-9][\w.-]*\.gguf", re.ASCII | re.IGNORECASE)
"""Names of files that are downloaded: no name leads out of a directory."""

_QUANTIZATION = re.compile(
    r"(?:.*?[-._])?((?:UD-)?(?:[IT]?Q\d\w*|B?F16|F32|MXFP4\w*))", re.ASCII | re.IGNORECASE
)
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$", re.ASCII)
_NO_MODEL = ("mmproj", "imatrix")
"""Beginnings of the names of files that are no language models."""


def choose_gguf(model: HubModel, names: Collection[str]) -> list[str]:
    """Chooses the files of one GGUF model of a repository: one file, or all parts of a split one, in order.

    Args:
        model: its `gguf` is compared with the quantization in each file's name, and with the name, without case. None
            is DEFAULT, or the only model.
        names: the names of all files.

    Returns:
        names; none where the repository has no GGUF files and `model` names none.

    Raises:
        ModelRefused: no model, or several, of that name; the message lists what there is. Or a part is missing.
    """
    found: dict[str, str] = {}  # the first file of each model -> its name without the number of a part
    for name in sorted(names):
        stem = Path(name).stem
        if _NAME.fullmatch(name) and not stem.startswith(_NO_MODEL):
            found.setdefault(_parts(name)[0], _SPLIT.sub("", stem))
    if not found and model.gguf is None:
        return []
    wanted = (model.gguf or DEFAULT).lower()
    matching = [
        first for first, stem in found.items() if wanted in (quantization(stem).lower(), stem.lower())
    ]
    if not matching and model.gguf is None and len(found) == 1:
        matching = list(found)
    if len(matching) != 1:
        raise _no_choice(model, matching, found)
    parts = _parts(matching[0])
    if missing := [part for part in parts if part not in names]:
        raise ModelRefused(
            f"all {len(parts)} parts of {matching[0]} of {model.name} on the Hub",
            f"no {missing[0]}",
            "choose another file or repository of the model",
        )
    return parts


def quantization(stem: str) -> str:
    """The quantization that the name of a GGUF file ends with; the whole name where it ends with none.

    >>> quantization("Qwen3-30B-A3B-UD-Q4_K_XL"), quantization("tiny.iq4_nl"), quantization("tiny")
    ('UD-Q4_K_XL', 'iq4_nl', 'tiny')
    """
    match = _QUANTIZATION.fullmatch(stem)
    return match[1] if match else stem


def gguf_head(repository: HubRepository, file: RemoteFile) -> tuple[bytes, int]:
    """Reads the header of a file on the Hub.

    Returns:
        the first bytes of the file, at least all of the header, and the offset of the first tensor; without tensors, of
        the file's end.

    Raises:
        BadHeader, TruncatedFile: the header contradicts the file's size.
        UserError, DamagedData: from HubRepository.read.
    """
    raw = _Beginning(repository, file)
    header = parse_gguf_header(f"{file.name} of {repository.model.name}", BufferedReader(raw, _PIECE))
    return bytes(raw.read_bytes), min((e.range.offset for e in header.tensors.values()), default=file.size)


class _Beginning(RawIOBase):
    """A file on the Hub that is read from its start on; `read_bytes` has what was read."""

    def __init__(self, repository: HubRepository, file: RemoteFile) -> None:
        self._repository, self._file, self._at = repository, file, 0
        self.read_bytes = bytearray()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + {SEEK_CUR: self._at, SEEK_END: self._file.size}.get(whence, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._file.size)
        if end > len(self.read_bytes):
            self.read_bytes += self._repository.read(self._file, len(self.read_bytes), end)
        piece = self.read_bytes[self._at : end]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def _parts(name: str) -> list[str]:
    """The names of all parts of the model that a file of a repository belongs to."""
    folder, slash, file = name.rpartition("/")
    return [f"{folder}{slash}{part}" for part in part_names(file)]


def _no_choice(model: HubModel, matching: list[str], names: dict[str, str]) -> ModelRefused:
    """The error about no file, or several files, of the wanted quantization; lists names that choose one each."""
    labels = [quantization(stem) for stem in names.values()]
    choices = [
        label if labels.count(label) == 1 else stem
        for label, stem in zip(labels, names.values(), strict=True)
    ]
    chosen = names[matching[0]] if matching else next(iter(choices), "")
    example = HubModel(model.repo, model.revision, chosen).name
    return ModelRefused(
        f"one GGUF model {model.gguf or DEFAULT} in {model.repo} on the Hub",
        ", ".join(matching or choices) or "no GGUF file",
        f"name one, such as {example}" if chosen else "choose a repository that has GGUF files",
    )
