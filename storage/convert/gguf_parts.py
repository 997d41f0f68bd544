"""The files of one GGUF model: itself, or the parts that llama-gguf-split or llama.cpp's converter has written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgemoe.errors import BadHeader, ModelRefused
from edgemoe.storage.files.untrusted import inside, shortened
from edgemoe.storage.formats.gguf_header import GgufEntry, GgufHeader, read_gguf_header

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.ASCII | re.IGNORECASE)

_ACTION = "download every part again, into one directory"


@dataclass(frozen=True)
class GgufParts:
    """The headers of a model's files.

    Args:
        header: header of the first file, which has the model's fields.
        tensors: name -> (file, entry), of all files.
    """

    header: GgufHeader
    tensors: dict[str, tuple[Path, GgufEntry]]


def first_part(names: Iterable[str]) -> str | None:
    """The first of the parts that a model is split into, where these are the names of all of them; else None.

    >>> first_part(["m-00002-of-00002.gguf", "m-00001-of-00002.gguf"])
    'm-00001-of-00002.gguf'
    >>> first_part(["m-00001-of-00002.gguf"]), first_part(["a.gguf", "b.gguf"])
    (None, None)
    """
    found = sorted(names)
    match = _PART.fullmatch(found[0]) if found else None
    return found[0] if match and found == part_names(found[0]) else None


def part_names(name: str) -> list[str]:
    """Names of all parts of the model that a file belongs to, in order; of a whole model its own."""
    match = _PART.fullmatch(name)
    if not match:
        return [name]
    return [f"{match[1]}-{number:05d}-of-{match[3]}{match[4]}" for number in range(1, int(match[3]) + 1)]


def read_parts(path: Path) -> GgufParts:
    """Reads the headers of a model's files.

    Args:
        path: the path of a file that is the whole model, or any part.

    Raises:
        ModelRefused: a part is a link out of the directory, or of another model.
        BadHeader, TruncatedFile, MissingTensor, ReadFailed: a part is damaged or missing.
    """
    names = part_names(path.name)
    paths = [inside(path.parent, name) for name in names] if len(names) > 1 else [path]
    headers = [read_gguf_header(each) for each in paths]
    tensors: dict[str, tuple[Path, GgufEntry]] = {}
    for number, (each, header) in enumerate(zip(paths, headers, strict=True)):
        found = header.fields.get("split.count", 0) or 1, header.fields.get("split.no", 0)
        if found != (len(paths), number):
            raise ModelRefused(
                f"part {number + 1} of {len(paths)} of a model in {each}",
                f"split.count {shortened(found[0])} and split.no {shortened(found[1])}",
                _ACTION
                if len(paths) > 1
                else "give it the name that llama-gguf-split gave it, next to its other parts",
            )
        if twice := tensors.keys() & header.tensors.keys():
            raise BadHeader(
                f"every tensor once in the parts of {path}", f"{shortened(min(twice))} twice", _ACTION
            )
        tensors |= {name: (each, entry) for name, entry in header.tensors.items()}
    count = headers[0].fields.get("split.tensors.count", len(tensors))
    if count != len(tensors):
        raise BadHeader(f"{shortened(count)} tensors in the parts of {path}", f"{len(tensors)}", _ACTION)
    return GgufParts(headers[0], tensors)
