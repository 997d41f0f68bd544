"""The cache of models: where stores and downloads lie, what they are called, and how a model is removed.

Imports no heavy package, since a shell completes names at every Tab.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from edgemoe.errors import UserError
from edgemoe.hub.name import HubModel
from edgemoe.machine.user_cache import user_cache
from edgemoe.storage.files.lock import StoreLock

_REMOVED = ".removed-"
"""Prefix of a directory whose removal has begun."""

_LAYOUT = r"(?:cpu-[a-z0-9]+(?:-paired)?|cuda)"
_HUB = re.compile(rf"(.+?--[^@]+@.+)-{_LAYOUT}", re.ASCII)
_LOCAL = re.compile(rf"((.+)-[0-9a-f]{{16}})-{_LAYOUT}", re.ASCII)


def stores_directory() -> Path:
    """The directory of converted models, one subdirectory each."""
    return user_cache() / "stores"


def downloads_directory() -> Path:
    """The directory of checkpoints from the Hub, complete or being streamed, one subdirectory each."""
    return user_cache() / "downloads"


def synthetic_directory() -> Path:
    """The directory of stores with random weights (bench.synthetic), one subdirectory each."""
    return user_cache() / "synthetic"


def heat_directory() -> Path:
    """The directory of the hot experts of stores that cannot be written to (models.heat)."""
    return user_cache() / "heat"


def kernels_directory() -> Path:
    """The directory of the times of this machine's kernels (kernels.probe)."""
    return user_cache() / "kernels"


def rates_path() -> Path:
    """The file of the rates of this machine's memories (speed.rates)."""
    return user_cache() / "rates.json"


def kv_directory() -> Path:
    """The directory of saved conversations' KV (kv.prefix_cache)."""
    return user_cache() / "kv"


def note_path(store: Path) -> Path:
    """The file that says how a store of the cache is still to be calibrated (conversion.first_codes)."""
    return store.with_name(f"{store.name}.calibrate")


def file_name(text: str) -> str:
    """Makes `text` one harmless file name."""
    return re.sub(r"[^A-Za-z0-9._@-]", "_", text)


def touch(store: Path) -> None:
    """Records that a cached store was used now. A store outside the cache is not changed."""
    if store.parent == stores_directory():
        with suppress(OSError):  # a read-only cache works too
            os.utime(store)


@dataclass(frozen=True)
class CachedName:
    """A model of the cache, by name.

    Args:
        short: the shortest name that no other model of the cache has; `edgemoe models` prints it.
        directory: the name of its directories, which no other model ever has.
        paths: its store, its checkpoint, or both.
    """

    short: str
    directory: str
    paths: tuple[Path, ...]


def aliases(directory: str) -> tuple[str, ...]:
    """Names that a directory of the cache answers to, the shortest first.

    >>> aliases("acme--tiny@main-cpu-avx2")
    ('acme/tiny', 'acme--tiny@main-cpu-avx2')
    >>> aliases("qwen3-1f2e3d4c5b6a7988-cpu-avx2")
    ('qwen3', 'qwen3-1f2e3d4c5b6a7988', 'qwen3-1f2e3d4c5b6a7988-cpu-avx2')
    """
    if (match := _HUB.fullmatch(directory)) and (model := HubModel.from_slug(match[1])):
        return model.name, directory
    if local := _LOCAL.fullmatch(directory):
        return local[2], local[1], directory
    return (directory,)


def cached_names() -> list[CachedName]:
    """Lists the cache by name, sorted."""
    found: dict[str, list[Path]] = {}
    for parent in (stores_directory(), downloads_directory()):
        for path in _directories(parent):
            found.setdefault(path.name, []).append(path)
    taken = Counter(alias for directory in found for alias in aliases(directory))
    return sorted(
        (
            CachedName(
                next((a for a in aliases(directory) if taken[a] == 1), directory), directory, tuple(paths)
            )
            for directory, paths in found.items()
        ),
        key=lambda name: name.short,
    )


def find_cached(text: str) -> CachedName:
    """Finds the model of a name, or the only model one of whose names begins so, with or without its organisation.

    Raises:
        UserError: no model or several models match.
    """
    matching = _matching(text)
    if len(matching) == 1:
        return matching[0]
    known = ", ".join(name.short for name in matching or cached_names()) or "nothing"
    raise UserError(
        f"one model of the cache whose name is or begins with {text!r}",
        f"{len(matching)} of them, {known}" if matching else f"none: the cache has {known}",
        "give a name that `edgemoe models` prints",
    )


def find_layout(text: str, layout: str = "") -> CachedName:
    """Finds the model of a name as find_cached does, and chooses one where all that match are layouts of one model.

    Args:
        text: a name, or its beginning.
        layout: the layout to choose; the most recently used store is chosen where none has it.

    Raises:
        UserError: from find_cached.
    """
    matching = _matching(text)
    if len({model_of(name.directory) for name in matching}) != 1:
        return find_cached(text)

    def rank(name: CachedName) -> tuple[bool, float]:
        return name.directory == f"{model_of(name.directory)}-{layout}", name.paths[0].stat().st_mtime

    return max(matching, key=rank)


def model_of(directory: str) -> str:
    """The part of a directory's name that all layouts of a model share.

    >>> model_of("acme--tiny@main-cpu-avx2"), model_of("qwen3-1f2e3d4c5b6a7988-cuda")
    ('acme--tiny@main', 'qwen3-1f2e3d4c5b6a7988')
    """
    match = _HUB.fullmatch(directory) or _LOCAL.fullmatch(directory)
    return match[1] if match else directory


def _matching(text: str) -> list[CachedName]:
    """The models with a name, or, where there are none, the models one of whose names begins so."""
    names = cached_names()
    matching = [name for name in names if text in (name.short, name.directory)]
    return matching or [name for name in names if _begins(name.directory, text)]


def store_path(model: Path) -> Path:
    """The directory of a store: `model` where it exists or is no name, else the directory of the model in the cache.

    Raises:
        UserError: from find_cached.
    """
    return model if model.exists() or not is_name(model) else find_layout(str(model)).paths[0]


def is_name(path: Path) -> bool:
    """Whether a path can be a model's name: one part, or an organisation's and a model's."""
    return len(path.parts) == 1 or HubModel.parse(str(path)) is not None


def remove(model: CachedName) -> None:
    """Removes a model from the cache, all paths or none.

    Raises:
        StoreBusy: a process is using it.
        UserError: a path is a link, whose target lies outside of the cache, or may not be removed by this user.
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
            try:
                path.rename(removed)
                note_path(path).unlink(missing_ok=True)
                shutil.rmtree(removed)
            except OSError as error:
                wanted = f"{path}, which this user may remove"
                raise UserError(wanted, str(error), "remove it as the user that it belongs to") from error


def _begins(directory: str, text: str) -> bool:
    short = aliases(directory)[0]
    return any(name.startswith(text) for name in (*aliases(directory), short.rpartition("/")[2]))


def _directories(parent: Path) -> Iterator[Path]:
    """Yields the directories of models in a directory of the cache; finishes removals that were killed."""
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        if path.name.startswith(_REMOVED):
            shutil.rmtree(path, ignore_errors=True)
        elif path.is_dir():
            yield path


def disk_bytes(directory: Path) -> int:
    """Bytes of disk that a directory's files occupy; holes of sparse files do not count."""
    size = 0
    for path in directory.rglob("*"):
        with suppress(FileNotFoundError):  # a running conversion renames its files
            size += path.lstat().st_blocks * 512
    return size
