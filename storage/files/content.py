"""Digests of whole files, which are read again only where size, times or inode have changed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import xxhash

from edgemoe.errors import EdgemoeError
from edgemoe.machine.cgroups import cores
from edgemoe.machine.user_cache import user_cache
from edgemoe.storage.files.atomic import replacing, write_all
from edgemoe.storage.files.source_file import read_range

_PIECE = 8 << 20
"""Bytes read and hashed at a time, per thread."""

_THREADS = 4
"""Files read at once, at most."""

SETTLED = 2_000_000_000
"""Nanoseconds since the last change of a file from which on every further change gives it another time."""

State = tuple[int, int, int, int]
"""Size in bytes, time of the last write and of the last change in ns, and inode of a file."""

_known: dict[Path, tuple[State, str]] = {}


def content_digests(paths: Iterable[Path]) -> dict[Path, str]:
    """Computes the SHA-256 of the content of each file, in hex digits.

    A digest is kept in memory and in the user's cache, and used as long as the file's State is the same. A file that
    changed within SETTLED is always read.

    Raises:
        MissingTensor, ReadFailed, TruncatedFile: a file cannot be read, or became shorter meanwhile.
        OSError: a file does not exist.
    """
    files = list(paths)
    with ThreadPoolExecutor(max(1, min(_THREADS, cores(), len(files)))) as pool:
        return dict(zip(files, pool.map(_digest, files), strict=True))


def _digest(path: Path) -> str:
    place, state = path.resolve(), _state(path)
    if place not in _known and (read := _recorded(place)):
        _known[place] = read
    if place in _known and _known[place][0] == state:
        return _known[place][1]
    digest = hashlib.sha256()
    for offset in range(0, state[0], _PIECE):
        digest.update(read_range(path, offset, min(_PIECE, state[0] - offset)).data)
    found = state, digest.hexdigest()
    if _state(path) == state and time.time_ns() - max(state[1:3]) > SETTLED:
        _known[place] = found
        _record(place, found)
    return found[1]


def _state(path: Path) -> State:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _file_of(place: Path) -> Path:
    return user_cache() / "contents" / f"{xxhash.xxh3_128_hexdigest(os.fsencode(place))}.json"


def _recorded(place: Path) -> tuple[State, str] | None:
    """The state and digest that an earlier process recorded; None without a record that can be read."""
    try:
        size, written, changed, inode, digest = json.loads(_file_of(place).read_bytes())
    except (OSError, ValueError, TypeError):
        return None
    return (size, written, changed, inode), str(digest)


def _record(place: Path, entry: tuple[State, str]) -> None:
    raw, file = json.dumps([*entry[0], entry[1]]).encode(), _file_of(place)
    with suppress(OSError, EdgemoeError):  # without a cache that can be written to the file is read again
        file.parent.mkdir(exist_ok=True)
        with replacing(file, len(raw)) as fd:
            write_all(fd, raw)
