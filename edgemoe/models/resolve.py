"""From what a user names as a model to a store: a store is used as it is, anything else is converted once."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from edgemoe.console.progress import ByteProgress
from edgemoe.families.table import family_of, require_known
from edgemoe.hub.name import HubModel
from edgemoe.hub.progress import PassingProgress
from edgemoe.kernels.registry import compute
from edgemoe.models.cache import downloads_directory, file_name, stores_directory, touch
from edgemoe.models.first_use import ASSUMED_RATE, DOWNLOAD_RATE, announce
from storage.base import PLANES_OF_LEVEL
from storage.checkpoint import Checkpoint, find_gguf
from storage.convert import convert
from storage.errors import UserError
from storage.layout import LAYOUTS, Layout
from storage.lock import StoreLock
from storage.manifest import MANIFEST_NAME, Manifest

KEPT = ".keep-source"
"""A file in a download's directory that says that the user wants to keep it."""


def choose_layout(name: str) -> Layout:
    """The layout of a name; `auto` is what this machine's kernel uses."""
    if name == "auto":
        return compute().layout
    if name not in LAYOUTS:
        raise UserError("a layout was wanted", f"got {name!r}", f"Choose auto or one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def convert_checkpoint(
    source: Path, destination: Path, *, max_level: int | None, layout: str, dense_bits: int
) -> Manifest:
    """Converts with a progress bar on stderr. `max_level` None is the highest that the source is worth.

    Raises:
        UserError, DamagedData, DoesNotFit: as storage.convert.convert.
    """
    _check_options(max_level, dense_bits)
    require_known(source)
    with ByteProgress(f"converting {source.name}") as progress:
        made = convert(
            source,
            destination,
            family_of(Checkpoint.open(source).config),
            max_level=max_level,
            layout=choose_layout(layout),
            dense_bits=dense_bits,
            progress=progress.update,
        )
    _say_error(made)
    return made


def convert_from_hub(
    model: HubModel,
    destination: Path,
    *,
    max_level: int | None,
    layout: str,
    dense_bits: int,
    keep_source: bool = False,
) -> Manifest:
    """Downloads a model's shards one after another and converts each before the next, with a bar on stderr.

    An interrupted call is taken up by the next. A finished store of the same model is left as it is.

    Args:
        model: on the Hub.
        destination: the store's directory.
        max_level: as convert_checkpoint's.
        layout: a name, or `auto`.
        dense_bits: 16 or 8.
        keep_source: keep the whole checkpoint, in the cache's directory of downloads.

    Raises:
        UserError: the Hub cannot be reached, or has no such model.
        DamagedData, DoesNotFit: as storage.convert.convert, and where a download fails.
    """
    from edgemoe.hub.checkpoint import open_passing

    _check_options(max_level, dense_bits)
    chosen = choose_layout(layout)
    source = downloads_directory() / f"{model.slug}-{chosen.name}"
    source.mkdir(parents=True, exist_ok=True)
    kept = source / KEPT
    if keep_source:
        kept.touch()
    with StoreLock(source, exclusive=True), ByteProgress(f"downloading and converting {model.name}") as bar:
        progress = PassingProgress(bar)
        shards, total = open_passing(model, source, keep=kept.exists(), progress=progress.downloaded)
        progress.expect(total)
        checkpoint = Checkpoint.open(source)
        if not (destination / MANIFEST_NAME).exists():
            announce(checkpoint, model.name, destination.parent, DOWNLOAD_RATE)
        made = convert(
            source,
            destination,
            family_of(checkpoint.config),
            max_level=max_level,
            layout=chosen,
            dense_bits=dense_bits,
            progress=progress.converted,
            arrivals=shards,
        )
        if kept.exists():
            shards.complete()
        else:
            shutil.rmtree(source)
    _say_error(made)
    return made


def convert_named(
    source: Path,
    destination: Path,
    *,
    max_level: int | None,
    layout: str,
    dense_bits: int,
    keep_source: bool,
) -> Manifest:
    """Converts what a user names: a checkpoint's directory, or a model of the Hub.

    Raises:
        UserError: also where keep_source is asked for a directory, which is never removed.
    """
    hub = None if source.exists() else HubModel.parse(str(source))
    if hub:
        return convert_from_hub(
            hub,
            destination,
            max_level=max_level,
            layout=layout,
            dense_bits=dense_bits,
            keep_source=keep_source,
        )
    if keep_source:
        raise _not_downloaded(source)
    return convert_checkpoint(source, destination, max_level=max_level, layout=layout, dense_bits=dense_bits)


def resolve_store(model: Path, layout: str = "auto", *, keep_source: bool = False) -> Path:
    """The store directory for `model`: itself, or its cached conversion, made now if need be.

    A conversion that takes a while is announced on stderr.

    Args:
        model: a store, a checkpoint, or what a model is called on the Hub.
        layout: of a conversion.
        keep_source: keep what is downloaded from the Hub; a store that is there already does not do for that.

    Raises:
        UserError: it is none of them; or keep_source is asked for what is no model of the Hub.
    """
    hub = None if model.exists() else HubModel.parse(str(model))
    if keep_source and not hub:
        raise _not_downloaded(model)
    if (model / MANIFEST_NAME).exists():
        touch(model)
        return model
    if hub:
        store = _cached(hub.slug, layout)
        if keep_source or not (store / MANIFEST_NAME).exists():
            convert_from_hub(
                hub, store, max_level=None, layout=layout, dense_bits=16, keep_source=keep_source
            )
    elif (model / "config.json").exists() or find_gguf(model):
        require_known(model)
        checkpoint, name = Checkpoint.open(model), model.resolve().name
        store = _cached(f"{file_name(name)}-{checkpoint.fingerprint()[:16]}", layout)
        if not (store / MANIFEST_NAME).exists():
            announce(checkpoint, name, store.parent, ASSUMED_RATE)
            convert_checkpoint(model, store, max_level=None, layout=layout, dense_bits=16)
    else:
        raise _no_model(model)
    touch(store)
    return store


def _cached(name: str, layout: str) -> Path:
    """Where the cache has, or will have, a model's store in a layout."""
    return stores_directory() / f"{name}-{choose_layout(layout).name}"


def _say_error(made: Manifest) -> None:
    """Tells people how far a conversion is from its source."""
    if made.source_error is not None:
        print(
            f"{made.source_format} at level {made.max_level}: relative error {made.source_error:.4f} against the "
            "source (first and middle expert of every layer)",
            file=sys.stderr,
        )


def _check_options(max_level: int | None, dense_bits: int) -> None:
    if max_level is not None and (max_level not in PLANES_OF_LEVEL or max_level < 4):
        raise UserError("a highest level was wanted", f"got {max_level}", "Choose --max-level 8 or 4")
    if dense_bits not in (16, 8):
        raise UserError(
            "bits of the dense weights were wanted", f"got {dense_bits}", "Choose --dense-bits 16 or 8"
        )


def _not_downloaded(source: Path) -> UserError:
    return UserError(
        "--keep-source was wanted",
        f"{source} is no model of the Hub, and a directory is never removed",
        "Leave the option out",
    )


def _no_model(model: Path) -> UserError:
    return UserError(
        f"a model was wanted at {model}",
        "a directory with neither store.json nor config.json" if model.is_dir() else "no such directory",
        "Give a checkpoint directory, a GGUF file, one made by `edgemoe convert`, or org/name for a model of the Hub",
    )
