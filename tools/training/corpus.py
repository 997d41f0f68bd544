"""Texts to train on: books from a directory or a tar, and the standard library; whole files are held out."""

from __future__ import annotations

import sysconfig
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from storage.errors import UserError

HELD_OUT_SHARE = 24
"""One file in so many is held out."""

_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3", "encodings"}
)
"""Directories of the library that are not read; encodings' tables, made by one script, are nearly alike, so
that a held-out one would flatter."""


@dataclass(frozen=True)
class Domain:
    """Files of one kind of text. Training never reads `held_out`."""

    name: str
    training: tuple[str, ...]
    held_out: tuple[str, ...]


def _split(name: str, files: dict[str, str]) -> Domain:
    """By a hash of each file's name: the same split whatever order files were found in."""
    ranked = sorted(files, key=lambda file: (xxhash.xxh3_64_intdigest(file.encode()), file))
    held = max(1, len(ranked) // HELD_OUT_SHARE)
    return Domain(name, tuple(files[f] for f in ranked[held:]), tuple(files[f] for f in ranked[:held]))


def _read_tar(path: Path) -> dict[str, str]:
    files: dict[str, str] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.name.endswith(".txt") else None
            if stream is not None:
                files[Path(member.name).name] = stream.read().decode(errors="replace")
    return files


def read_books(source: Path) -> Domain:
    """Prose.

    Args:
        source: a directory with .txt files at any depth, or a tar of them.

    Raises:
        UserError: fewer than two texts are there.
    """
    if source.is_dir():
        files = {p.name: p.read_text(errors="replace") for p in sorted(source.rglob("*.txt"))}
    elif source.is_file() and tarfile.is_tarfile(source):
        files = _read_tar(source)
    else:
        files = {}
    if len(files) < 2:
        wanted = "two or more .txt files (one is held out) were wanted, in a directory or a tar"
        raise UserError(wanted, f"{source} has {len(files)}", "Give such a --corpus")
    return _split("prose", files)


def read_stdlib() -> Domain:
    """The running interpreter's own library sources, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {}
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if not _SKIPPED & set(inside.parts):
            files[inside.as_posix()] = path.read_text(errors="replace")
    return _split("python", files)


def encode(tokenizer: object, texts: tuple[str, ...]) -> np.ndarray:
    """All texts in one row of uint16 tokens, an end-of-text token before each.

    Args:
        tokenizer: a fast transformers tokenizer of at most 65,536 tokens.
        texts: to encode.

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
