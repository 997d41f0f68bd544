"""Reads the training texts: books from a directory or a tar, and the standard library; holds whole files out."""

from __future__ import annotations

import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from edgemoe.errors import UserError

HELD_OUT_ONE_IN = 24
"""One file of this many is held out."""

_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3", "encodings"}
)
"""Directories of the library that are not read. The tables of encodings are nearly equal: a held-out one would make the
perplexity too good."""


@dataclass(frozen=True)
class Domain:
    """The files of one kind of text; training never reads `held_out`."""

    name: str
    training: tuple[str, ...]
    held_out: tuple[str, ...]


def _split(name: str, files: dict[str, str]) -> Domain:
    """Splits by a hash of each file's name, so that the order of the files does not matter."""
    ranked = sorted(files, key=lambda file: (xxhash.xxh3_64_intdigest(file.encode()), file))
    count = max(1, len(ranked) // HELD_OUT_ONE_IN)
    return Domain(name, tuple(files[f] for f in ranked[count:]), tuple(files[f] for f in ranked[:count]))


def _read_tar(path: Path) -> dict[str, str]:
    files: dict[str, str] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.name.endswith(".txt") else None
            if stream is not None:
                files[Path(member.name).name] = stream.read().decode(errors="replace")
    return files


def read_books(source: Path) -> Domain:
    """Reads prose.

    Args:
        source: a directory with .txt files at any depth, or a tar of them.

    Raises:
        UserError: `source` has fewer than two texts.
    """
    if source.is_dir():
        files = {p.name: p.read_text(errors="replace") for p in sorted(source.rglob("*.txt"))}
    elif source.is_file() and tarfile.is_tarfile(source):
        files = _read_tar(source)
    else:
        files = {}
    if len(files) < 2:
        wanted = f"two or more .txt files (one is held out) in the directory or tar {source}"
        raise UserError(wanted, str(len(files)), "name another --corpus")
    return _split("prose", files)


def read_stdlib() -> Domain:
    """Reads the sources of the running interpreter's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if not _SKIPPED & set(inside.parts):
            files[inside.as_posix()] = path.read_text(errors="replace")
    return _split("python", files)


def encode(tokenizer: object, texts: tuple[str, ...]) -> np.ndarray:
    """Encodes all texts as one row of tokens, with an end-of-text token before each.

    Args:
        tokenizer: a fast transformers tokenizer of at most 65,536 tokens.
        texts: the texts, in the order of the row.

    Returns:
        uint16 [tokens].
    """
    backend = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
    start = np.array([tokenizer.bos_token_id], np.uint16)  # type: ignore[attr-defined]
    rows = []
    for first in range(0, len(texts), 16):
        encoded = backend.encode_batch_fast(list(texts[first : first + 16]), add_special_tokens=False)
        for each in encoded:
            rows += [start, np.array(each.ids, np.uint16)]
    return np.concatenate(rows)
