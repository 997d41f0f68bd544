"""The models in the cache, described."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from edgemoe.errors import EdgemoeError
from edgemoe.models.cache import CachedName, cached_names, disk_bytes
from edgemoe.storage.base import LEVELS
from edgemoe.storage.files.header import read_header
from edgemoe.storage.files.untrusted import read_json
from edgemoe.storage.store.dense_shapes import weights_of
from edgemoe.storage.store.manifest import MANIFEST_NAME, SCALE_SUFFIX, Manifest


@dataclass(frozen=True)
class CachedModel:
    """A model of the cache.

    Args:
        name: the name of its directories.
        short: its name for people and for other commands.
        paths: its store, its checkpoint, or both.
        bytes: size on disk of all paths.
        state: `ready`, `unfinished` (a conversion or download that can be resumed) or `damaged`.
        levels: levels of its experts, highest first; empty unless ready.
        layout: how its records are laid out; None unless ready.
        family: model_type of its config.json; None unless ready.
        parameters: number of its weights; None unless ready.
        compensated: mean rank of its experts' compensators; None without any.
        last_used: seconds since the epoch.
    """

    name: str
    short: str
    paths: tuple[Path, ...]
    bytes: int
    state: str
    levels: tuple[int, ...]
    layout: str | None
    family: str | None
    parameters: int | None
    compensated: int | None
    last_used: float

    def as_json(self) -> dict[str, Any]:
        """Every field, by name."""
        return asdict(self) | {"paths": [str(path) for path in self.paths]}


def cached_models() -> list[CachedModel]:
    """Lists the cache, most recently used model first."""
    return sorted(map(_describe, cached_names()), key=lambda model: -model.last_used)


def _describe(name: CachedName) -> CachedModel:
    store, state = name.paths[0], "unfinished"
    found = StoreContents()
    if (store / MANIFEST_NAME).exists():
        try:
            found, state = contents_of(store), "ready"
        except EdgemoeError:
            state = "damaged"
    size, used = sum(map(disk_bytes, name.paths)), store.stat().st_mtime
    return CachedModel(name.directory, name.short, name.paths, size, state, *found, used)


class StoreContents(NamedTuple):
    """The contents of a store.

    Args:
        levels, layout, family, parameters, compensated: see CachedModel.
    """

    levels: tuple[int, ...] = ()
    layout: str | None = None
    family: str | None = None
    parameters: int | None = None
    compensated: int | None = None


def contents_of(store: Path) -> StoreContents:
    """Describes a finished store.

    Raises:
        EdgemoeError: it is damaged.
    """
    manifest = Manifest.load(store)
    dense = read_header(store / manifest.dense_name).tensors
    weights = sum(
        weights_of(tensor.spec) for name, tensor in dense.items() if not name.endswith(SCALE_SUFFIX)
    )
    experts = sum(len(layer.records) for layer in manifest.layers.values())
    family = read_json(store, "config.json").get("model_type")
    levels = tuple(level for level in LEVELS if 0 < level <= manifest.max_level)
    rank = manifest.compensators.mean_rank if manifest.compensators else None
    weights += experts * manifest.geometry.weights
    return StoreContents(levels, manifest.layout, family, weights, rank)
