"""The stores that edgemoe made by itself: where they lie, what is in them, and how one is removed."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from storage.base import LEVELS
from storage.errors import EdgemoeError, StoreBusy, UserError
from storage.lock import StoreLock
from storage.manifest import MANIFEST_NAME, Manifest

_REMOVED = ".removed-"

_UNFINISHED: tuple[str, tuple[int, ...], str | None] = ("unfinished", (), None)


def stores_directory() -> Path:
    """Where conversions of checkpoints are kept, one directory each."""
    return Path(platformdirs.user_cache_dir("edgemoe")) / "stores"


def downloads_directory() -> Path:
    """Where checkpoints from the Hub pass through, one directory each."""
    return Path(platformdirs.user_cache_dir("edgemoe")) / "downloads"


def file_name(text: str) -> str:
    """`text` as one harmless name of a file."""
    return re.sub(r"[^A-Za-z0-9._@-]", "_", text)


def touch(store: Path) -> None:
    """Notes that a cached store was used now. Stores elsewhere are not changed."""
    if store.parent == stores_directory():
        with suppress(OSError):  # a cache that may not be written is used all the same
            os.utime(store)


@dataclass(frozen=True)
class CachedModel:
    """A model of the cache.

    Args:
        name: as `rm` takes it.
        paths: of its store, of the checkpoint that is passing or was kept, or of both.
        size: bytes they take on disk.
        state: `ready`, `unfinished` (a conversion or download that can go on) or `damaged`.
        levels: that its experts can be computed at, highest first; empty unless ready.
        layout: of its records; None unless ready.
        last_used: seconds since the epoch.
    """

    name: str
    paths: tuple[Path, ...]
    size: int
    state: str
    levels: tuple[int, ...]
    layout: str | None
    last_used: float


def cached_models() -> list[CachedModel]:
    """Everything in the cache, most recently used first. Sweeps up what a killed removal left."""
    found: dict[str, list[Path]] = {}
    for parent in (stores_directory(), downloads_directory()):
        for path in _directories(parent):
            found.setdefault(path.name, []).append(path)
    return sorted((_describe(paths) for paths in found.values()), key=lambda model: -model.last_used)


def find_cached(name: str) -> CachedModel:
    """The model of a name, or of the one name that begins with it.

    Raises:
        UserError: there is none, or more than one.
    """
    models = cached_models()
    wanted = file_name(name.replace("/", "--"))
    matching = [m for m in models if name == m.name] or [m for m in models if m.name.startswith(wanted)]
    if len(matching) == 1:
        return matching[0]
    known = ", ".join(model.name for model in matching or models) or "nothing"
    raise UserError(
        f"one model of the cache was wanted by the name {name!r}",
        f"{len(matching)} begin with it; the cache has {known}" if matching else f"the cache has {known}",
        "Give a name as `edgemoe models` prints it",
    )


def remove(model: CachedModel) -> None:
    """Removes a model from the cache, whole or not at all.

    Raises:
        StoreBusy: a process is using it.
    """
    with ExitStack() as locks:
        try:
            for path in model.paths:
                locks.enter_context(StoreLock(path, exclusive=True))
        except StoreBusy as error:
            raise StoreBusy(f"{model.name} was wanted removed", error.found, error.action) from error
        for path in model.paths:
            # The name goes first: a removal that is killed leaves no store that looks whole.
            gone = path.with_name(f"{_REMOVED}{path.name}-{time.time_ns()}")
            path.rename(gone)
            shutil.rmtree(gone)


def _directories(parent: Path) -> Iterator[Path]:
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if path.name.startswith(_REMOVED):
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_dir():
            yield path


def _describe(paths: list[Path]) -> CachedModel:
    store, size = paths[0], sum(map(_disk_bytes, paths))
    state, levels, layout = _UNFINISHED
    if (store / MANIFEST_NAME).exists():
        try:
            manifest = Manifest.load(store)
        except EdgemoeError:
            state = "damaged"
        else:
            state, layout = "ready", manifest.layout
            levels = tuple(level for level in LEVELS if 0 < level <= manifest.max_level)
    return CachedModel(store.name, tuple(paths), size, state, levels, layout, store.stat().st_mtime)


def _disk_bytes(directory: Path) -> int:
    """Bytes of disk behind a directory's files; a sparse file counts what it has."""
    size = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # a conversion that is going on renames its files
            size += path.lstat().st_blocks * 512
    return size
