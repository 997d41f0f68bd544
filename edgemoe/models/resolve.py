"""Resolves a model's name to a store: a store is used in place, any other model is converted once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from edgemoe.console.loading import spinner
from edgemoe.errors import UserError
from edgemoe.families.table import require_known
from edgemoe.hub.name import HubModel
from edgemoe.models.cache import (
    aliases,
    cached_names,
    file_name,
    find_cached,
    is_name,
    stores_directory,
    touch,
)
from edgemoe.models.calibration import adopt_calibration
from edgemoe.models.conversion.download import choose_layout, download_path
from edgemoe.models.conversion.first_use import DENSE_BITS, announce
from edgemoe.models.conversion.named import hub_model
from edgemoe.models.conversion.run import Check, Options, convert_checkpoint, convert_from_hub
from edgemoe.models.conversion.waiting import convert_once
from edgemoe.models.published.announced import announced_checkpoint, announced_name, known_repository
from edgemoe.storage.convert.checkpoint import Checkpoint, find_gguf
from edgemoe.storage.store.manifest import MANIFEST_NAME


@dataclass(frozen=True)
class _Place:
    """Where the store of a model lies or will lie.

    Args:
        store: its directory.
        name: the model's name, for people.
        hub: the model on the Hub; None for a directory.
        checkpoint: the checkpoint to convert, its headers read; None for a store that is used in place and on the Hub.
    """

    store: Path
    name: str
    hub: HubModel | None = None
    checkpoint: Checkpoint | None = None

    @property
    def finished(self) -> bool:
        return (self.store / MANIFEST_NAME).exists()


def resolve_store(
    model: Path,
    layout: str = "auto",
    *,
    keep_source: bool = False,
    check: Check = lambda checkpoint: None,
) -> Path:
    """Returns the store of `model`: the model itself, or its cached conversion, made now if it is missing.

    A long conversion is announced on stderr. While another process converts the model this one waits for it.

    Args:
        model: a store, a checkpoint, the name of a model on the Hub, or a name that `edgemoe models` prints.
        layout: how a conversion lays out records.
        keep_source: keeps the downloaded checkpoint; downloads it even if the store exists.
        check: may refuse a conversion by the checkpoint's headers, before it begins.

    Raises:
        UserError: no such model, several whose names begin so, or keep_source without a model of the Hub.
    """
    place = _locate(model, layout, keep_source)
    if place.hub:
        _convert_hub(place.hub, place, layout, keep_source, check)
    elif place.checkpoint:
        _convert_on_disk(model, place, layout, check)
    touch(place.store)
    return place.store


def _convert_hub(hub: HubModel, place: _Place, layout: str, keep_source: bool, check: Check) -> None:
    """Converts a model of the Hub where its store is unfinished, or its source is to be kept."""
    convert_once(
        place.name,
        place.store,
        lambda: keep_source or not place.finished,
        lambda: convert_from_hub(hub, place.store, keep_source=keep_source, check=check, **_options(layout)),
        download=download_path(hub, layout),
    )


def _convert_on_disk(model: Path, place: _Place, layout: str, check: Check) -> None:
    """Converts a checkpoint whose store is unfinished, and announces it; copies its calibration into the store."""

    def accept(checkpoint: Checkpoint) -> None:
        check(checkpoint)
        announce(checkpoint, place.name, place.store.parent)

    def convert() -> None:
        convert_checkpoint(model, place.store, check=accept, **_options(layout))

    convert_once(place.name, place.store, lambda: not place.finished, convert)
    adopt_calibration(model, place.store)


def _options(layout: str) -> Options:
    return Options(max_level=None, layout=layout, dense_bits=DENSE_BITS)


@contextmanager
def store_or_headers(model: Path, layout: str) -> Iterator[Path | Checkpoint]:
    """Yields the store of a model, or, where it is still to be made, the checkpoint with its headers read and checked.

    Nothing is converted, and of a model on the Hub only the headers are downloaded. A name of models.published needs no
    download: its checkpoint is made of published sizes.

    Args:
        model, layout: see resolve_store.

    Raises:
        UserError, DamagedData: as resolve_store, or from check_runnable.
    """
    place = _locate(model, layout, keep_source=False)
    if place.finished:
        touch(place.store)
        yield place.store
        return
    if name := announced_name(model):
        yield announced_checkpoint(name)
        return
    from edgemoe.hub.checkpoint import open_streamed
    from edgemoe.models.runnable import check_runnable

    with TemporaryDirectory() as directory:
        if place.hub:
            open_streamed(place.hub, Path(directory), keep=False, progress=lambda size: None)
        checkpoint = place.checkpoint or Checkpoint.open(Path(directory))
        check_runnable(checkpoint, DENSE_BITS)
        yield checkpoint


def _locate(model: Path, layout: str, keep_source: bool) -> _Place:
    """Finds the place of a model's store; raises as resolve_store."""
    hub = hub_model(model, keep_source)
    if not hub:
        model = _by_name(model)
        hub = hub_model(model, keep_source)
    if (model / MANIFEST_NAME).exists():
        return _Place(model, str(model))
    if hub:
        return _Place(_cached(hub.slug, layout), hub.name, hub)
    if (model / "config.json").exists() or find_gguf(model):
        require_known(model)
        checkpoint, name = Checkpoint.open(model), model.resolve().name
        with spinner(f"comparing {name} with what was converted before"):
            store = _cached(f"{file_name(name)}-{checkpoint.fingerprint()[:16]}", layout)
        return _Place(store, name, None, checkpoint)
    if (model / "adapter_config.json").exists():
        raise UserError(
            f"a whole model at {model}", "a LoRA adapter", "merge it into its model, and give the result"
        )
    found = "a file that is no GGUF" if model.exists() else "no such file or directory"
    raise UserError(
        f"a model at {model}",
        "a directory with neither store.json nor config.json" if model.is_dir() else found,
        "give a checkpoint directory, a GGUF file, a store made by `edgemoe convert`, or org/name for a model of the "
        "Hub",
    )


def _by_name(model: Path) -> Path:
    """The store in the cache that a name stands for, or the name on the Hub of an unfinished one; else `model`.

    A short name, and a name of models.published that the cache does not have, stand for their models on the Hub.

    Raises:
        UserError: no model or several models match, or a conversion of a directory is unfinished.
    """
    if model.exists() or not is_name(model):
        return model
    if known := known_repository(model, [each.directory for each in cached_names()]):
        return known
    found = find_cached(str(model))
    if (found.paths[0] / MANIFEST_NAME).exists():
        return found.paths[0]
    on_hub = aliases(found.directory)[0]
    if HubModel.parse(on_hub):
        return Path(on_hub)
    raise UserError(
        f"a finished conversion of {found.short}",
        "an unfinished one",
        "give its checkpoint's directory: the conversion resumes",
    )


def _cached(name: str, layout: str) -> Path:
    """The path of a model's store in the cache, whether it exists or not."""
    return stores_directory() / f"{name}-{choose_layout(layout).name}"
