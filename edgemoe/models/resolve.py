"""Resolves a model's name to a store: a store is used in place, any other model is converted once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict, Unpack

from edgemoe.console.progress import ByteProgress
from edgemoe.console.width import say
from edgemoe.errors import UserError
from edgemoe.families.table import family_of, require_known
from edgemoe.hub.name import HubModel
from edgemoe.hub.progress import ConversionProgress
from edgemoe.kernels.registry import compute
from edgemoe.models.cache import (
    aliases,
    downloads_directory,
    file_name,
    find_cached,
    is_name,
    stores_directory,
    touch,
)
from edgemoe.models.calibration import adopt_calibration
from edgemoe.models.first_use import DENSE_BITS, announce
from edgemoe.models.waiting import convert_once
from edgemoe.storage.convert.checkpoint import Checkpoint, find_gguf
from edgemoe.storage.convert.run import convert
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.record.layout import LAYOUTS, Layout
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest

KEPT = ".keep-source"
"""Marker file in a download's directory: the checkpoint stays after conversion."""


def choose_layout(name: str) -> Layout:
    """Looks up a layout by name; `auto` is the layout of this machine's fastest CPU kernel."""
    if name == "auto":
        return compute().layout
    if name not in LAYOUTS:
        raise UserError("the name of a layout", repr(name), f"choose auto or one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


Check = Callable[[Checkpoint], object]
"""Raises an EdgemoeError for a checkpoint that is not to be converted; reads no weights."""


class Options(TypedDict):
    """The options of a conversion.

    Args:
        max_level: 8, 4, or None for the highest level that the source's precision justifies.
        layout: a name, or `auto`.
        dense_bits: 16 or 8.
    """

    max_level: int | None
    layout: str
    dense_bits: int


def convert_checkpoint(
    source: Path,
    destination: Path,
    *,
    check: Check = lambda checkpoint: None,
    **options: Unpack[Options],
) -> Manifest:
    """Converts a checkpoint on disk, with a progress bar on stderr.

    Args:
        source: the checkpoint's directory, or a GGUF file.
        destination: the store's directory.
        check: may refuse the checkpoint by its headers.
        options: of the conversion.

    Raises:
        UserError, DamagedData, DoesNotFit: from storage.convert.run.convert.
    """
    from edgemoe.models.runnable import check_runnable

    checked = _checked(options)
    require_known(source)
    checkpoint = Checkpoint.open(source)
    check_runnable(checkpoint, options["dense_bits"])
    check(checkpoint)
    family = family_of(checkpoint.config)
    with ByteProgress(f"converting {source.name}") as bar:
        manifest = convert(source, destination, family, **checked, progress=bar.update)
    adopt_calibration(source, destination)
    _print_error(manifest)
    return manifest


def convert_from_hub(
    model: HubModel,
    destination: Path,
    *,
    keep_source: bool = False,
    check: Check = lambda checkpoint: None,
    **options: Unpack[Options],
) -> Manifest:
    """Downloads a model shard by shard and converts each shard before the next, with a bar on stderr.

    Resumes an interrupted call. Leaves a finished store of the same model unchanged.

    Args:
        model: on the Hub.
        destination: the store's directory.
        keep_source: keeps the whole checkpoint in downloads_directory().
        check: may refuse the checkpoint by its headers, before weights are downloaded.
        options: of the conversion.

    Raises:
        UserError: the Hub cannot be reached, or has no such model.
        DamagedData, DoesNotFit: from storage.convert.run.convert, or a failed download.
    """
    from edgemoe.hub.checkpoint import open_streamed
    from edgemoe.models.runnable import check_runnable

    checked = _checked(options)
    source = _download(model, options["layout"])
    source.mkdir(parents=True, exist_ok=True)
    kept = source / KEPT
    if keep_source:
        kept.touch()
    with StoreLock(source, exclusive=True), ByteProgress(f"downloading and converting {model.name}") as bar:
        progress = ConversionProgress(bar)
        shards, total = open_streamed(model, source, keep=kept.exists(), progress=progress.downloaded)
        progress.expect(total)
        checkpoint = Checkpoint.open(source)
        check_runnable(checkpoint, options["dense_bits"])
        if not (destination / MANIFEST_NAME).exists():
            check(checkpoint)
            announce(checkpoint, model.name, destination.parent, download=True)
        family = family_of(checkpoint.config)
        manifest = convert(
            source, destination, family, **checked, progress=progress.converted, arrivals=shards
        )
        if kept.exists():
            shards.complete()
        else:
            shutil.rmtree(source)
    _print_error(manifest)
    return manifest


def convert_named(
    source: Path, destination: Path, *, keep_source: bool = False, **options: Unpack[Options]
) -> Manifest:
    """Converts a checkpoint's directory, or a model of the Hub by its name. A directory goes first.

    Raises:
        UserError: also for keep_source with a directory, which is never removed, and, before anything is read, for a
            destination that cannot be a directory.
    """
    _require_directory(destination)
    hub = _hub_model(source, keep_source)
    if hub:
        return convert_from_hub(hub, destination, keep_source=keep_source, **options)
    return convert_checkpoint(source, destination, **options)


@dataclass(frozen=True)
class _Place:
    """Where the store of a model lies or will lie.

    Args:
        store: its directory.
        name: of the model, for people.
        hub: the model on the Hub; None for a directory.
        checkpoint: to be converted, with its headers read; None for a store that is used in place and on the Hub.
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
        layout: of a conversion.
        keep_source: keeps the downloaded checkpoint; downloads it even if the store exists.
        check: may refuse a conversion by the checkpoint's headers, before it begins.

    Raises:
        UserError: no such model, several whose names begin so, or keep_source without a model of the Hub.
    """
    place = _locate(model, layout, keep_source)
    store, hub = place.store, place.hub
    options = Options(max_level=None, layout=layout, dense_bits=DENSE_BITS)
    if hub:
        convert_once(
            place.name,
            store,
            lambda: keep_source or not place.finished,
            lambda: convert_from_hub(hub, store, keep_source=keep_source, check=check, **options),
            download=_download(hub, layout),
        )
    elif place.checkpoint:

        def accept(checkpoint: Checkpoint) -> None:
            check(checkpoint)
            announce(checkpoint, place.name, store.parent)

        def convert() -> None:
            convert_checkpoint(model, store, check=accept, **options)

        convert_once(place.name, store, lambda: not place.finished, convert)
        adopt_calibration(model, store)
    touch(store)
    return store


@contextmanager
def store_or_headers(model: Path, layout: str) -> Iterator[Path | Checkpoint]:
    """Yields the store of a model, or, where it is still to be made, the checkpoint with its headers read and checked.

    Nothing is converted, and of a model on the Hub only the headers are downloaded.

    Args:
        model, layout: as for resolve_store.

    Raises:
        UserError, DamagedData: as resolve_store, or from check_runnable.
    """
    place = _locate(model, layout, keep_source=False)
    if place.finished:
        touch(place.store)
        yield place.store
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
    hub = _hub_model(model, keep_source)
    if not hub:
        model = _by_name(model)
        hub = _hub_model(model, keep_source)
    if (model / MANIFEST_NAME).exists():
        return _Place(model, str(model))
    if hub:
        return _Place(_cached(hub.slug, layout), hub.name, hub)
    if (model / "config.json").exists() or find_gguf(model):
        require_known(model)
        checkpoint, name = Checkpoint.open(model), model.resolve().name
        store = _cached(f"{file_name(name)}-{checkpoint.fingerprint()[:16]}", layout)
        return _Place(store, name, None, checkpoint)
    if (model / "adapter_config.json").exists():
        raise UserError(
            f"a whole model at {model}", "a LoRA adapter", "merge it into its model, and give the result"
        )
    raise UserError(
        f"a model at {model}",
        "a directory with neither store.json nor config.json" if model.is_dir() else "no such directory",
        "give a checkpoint directory, a GGUF file, a store made by `edgemoe convert`, or org/name for a model of the "
        "Hub",
    )


def _by_name(model: Path) -> Path:
    """The store in the cache that a name stands for, or the name on the Hub of an unfinished one; else `model`.

    Raises:
        UserError: no model or several models match, or a conversion of a directory is unfinished.
    """
    if model.exists() or not is_name(model):
        return model
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


def _require_directory(destination: Path) -> None:
    """Refuses a destination that is no directory, or that this user may not make or write to."""
    existing = next(path for path in (destination, *destination.absolute().parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        return
    found = "a directory that this user may not write to" if existing.is_dir() else "a file"
    raise UserError(f"a directory for a store at {destination}", f"{found} at {existing}", "choose another")


def _hub_model(model: Path, keep_source: bool) -> HubModel | None:
    """Parses the name of a model of the Hub; None for a path that exists or is no such name.

    Raises:
        UserError: keep_source is set and there is no model of the Hub to keep.
    """
    hub = None if model.exists() else HubModel.parse(str(model))
    if keep_source and not hub:
        raise UserError(
            "a model of the Hub for --keep-source",
            f"{model}, and a directory is never removed",
            "leave the option out",
        )
    return hub


def _cached(name: str, layout: str) -> Path:
    """The path of a model's store in the cache, whether it exists or not."""
    return stores_directory() / f"{name}-{choose_layout(layout).name}"


def _download(model: HubModel, layout: str) -> Path:
    """The path of a model's checkpoint in the cache, while it is converted to a layout or kept."""
    return downloads_directory() / f"{model.slug}-{choose_layout(layout).name}"


def _print_error(manifest: Manifest) -> None:
    """Prints the relative error of a conversion against its source on stderr."""
    if manifest.source_error is not None:
        say(
            f"{manifest.source_format} at level {manifest.max_level}: relative error {manifest.source_error:.4f} "
            "against the source (first and middle expert of every layer)"
        )


def _checked(options: Options) -> dict[str, Any]:
    """The options as storage.convert.run.convert takes them; raises UserError for a wrong one."""
    level, bits = options["max_level"], options["dense_bits"]
    if level not in (None, 8, 4):
        raise UserError("8 or 4 as highest level", str(level), "choose --max-level 8 or 4")
    if bits not in (16, 8):
        raise UserError("16 or 8 bits for the dense weights", str(bits), "choose --dense-bits 16 or 8")
    return options | {"layout": choose_layout(options["layout"])}
