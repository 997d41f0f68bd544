"""The cache of models: where stores and downloads lie, what they contain, and how a model is removed."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs

from storage.base import LEVELS
from storage.errors import EdgemoeError, UserError
from storage.lock import StoreLock
from storage.manifest import MANIFEST_NAME, Manifest

_REMOVED = ".removed-"
"""Prefix of a directory whose removal has begun."""


def _cache_directory() -> Path:
    """The root of the cache. Only its user may read it: models may be private."""
    root = Path(platformdirs.user_cache_dir("edgemoe"))
    with suppress(OSError):  # the first write to the cache reports why it cannot be made
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root


def stores_directory() -> Path:
    """The directory of converted models, one subdirectory each."""
    return _cache_directory() / "stores"


def downloads_directory() -> Path:
    """The directory of checkpoints from the Hub, complete or being streamed, one subdirectory each."""
    return _cache_directory() / "downloads"


def heat_directory() -> Path:
    """The directory of the hot experts of stores that cannot be written to (models.heat)."""
    return _cache_directory() / "heat"


def file_name(text: str) -> str:
    """Makes `text` one harmless file name."""
    return re.sub(r"[^A-Za-z0-9._@-]", "_", text)


def touch(store: Path) -> None:
    """Records that a cached store was used now. A store outside the cache is not changed."""
    if store.parent == stores_directory():
        with suppress(OSError):  # a read-only cache works too
            os.utime(store)


@dataclass(frozen=True)
class CachedModel:
    """A model of the cache.

    Args:
        name: for `edgemoe rm`.
        paths: its store, its checkpoint, or both.
        bytes: on disk, in all paths.
        state: `ready`, `unfinished` (a conversion or download that can be resumed) or `damaged`.
        levels: levels of its experts, highest first; empty unless ready.
        layout: of its records; None unless ready.
        last_used: seconds since the epoch.
    """

    name: str
    paths: tuple[Path, ...]
    bytes: int
    state: str
    levels: tuple[int, ...]
    layout: str | None
    last_used: float

    def as_json(self) -> dict[str, Any]:
        """Every field, by name."""
        return asdict(self) | {"paths": [str(path) for path in self.paths]}


def cached_models() -> list[CachedModel]:
    """Lists the cache, most recently used model first, and finishes removals that were killed."""
    found: dict[str, list[Path]] = {}
    for parent in (stores_directory(), downloads_directory()):
        for path in _directories(parent):
            found.setdefault(path.name, []).append(path)
    return sorted((_describe(paths) for paths in found.values()), key=lambda model: -model.last_used)


def find_cached(name: str) -> CachedModel:
    """Finds the model of a name, or the only model whose name begins so.

    Raises:
        UserError: no model or several models match.
    """
    models = cached_models()
    prefix = file_name(name.replace("/", "--"))
    matching = [m for m in models if name == m.name] or [m for m in models if m.name.startswith(prefix)]
    if len(matching) == 1:
        return matching[0]
    known = ", ".join(model.name for model in matching or models) or "nothing"
    raise UserError(
        f"one model of the cache whose name is or begins with {name!r}",
        f"{len(matching)} of them, {known}" if matching else f"none: the cache has {known}",
        "give a name that `edgemoe models` prints",
    )


def remove(model: CachedModel) -> None:
    """Removes a model from the cache, all paths or none.

    Raises:
        StoreBusy: a process is using it.
        UserError: a path is a link; its target lies outside of the cache.
    """
    for path in model.paths:
        if path.is_symlink():
            found, action = f"a link to {path.resolve()}", "remove the link, and its target if it is yours"
            raise UserError(f"a directory at {path}", found, action)
    with ExitStack() as locks:
        for path in model.paths:
            locks.enter_context(StoreLock(path, exclusive=True))
        for path in model.paths:
            # Renamed first: a removal that is killed leaves no store that looks complete.
            removed = path.with_name(f"{_REMOVED}{path.name}-{time.time_ns()}")
            path.rename(removed)
            shutil.rmtree(removed)


def _directories(parent: Path) -> Iterator[Path]:
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if path.name.startswith(_REMOVED):
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_dir():
            yield path


def _describe(paths: list[Path]) -> CachedModel:
    store, size = paths[0], sum(map(_disk_bytes, paths))
    state, levels, layout = "unfinished", tuple[int, ...](), None
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
    """Bytes of disk that a directory's files occupy; holes of sparse files do not count."""
    size = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # a running conversion renames its files
            size += path.lstat().st_blocks * 512
    return size
