"""Converts a checkpoint on disk, or a model of the Hub while it is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from edgemoe.console.progress import ByteProgress
from edgemoe.console.width import say
from edgemoe.errors import UserError
from edgemoe.families.table import family_of, require_known
from edgemoe.hub.name import HubModel
from edgemoe.hub.progress import ConversionProgress
from edgemoe.kernels.registry import compute
from edgemoe.models.cache import downloads_directory
from edgemoe.models.calibration import adopt_calibration
from edgemoe.models.conversion.first_use import announce
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.run import convert
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.record.layout import LAYOUTS, Layout
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest

if TYPE_CHECKING:
    from edgemoe.hub.shards import StreamedShards

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
    from edgemoe.models.runnable import check_runnable

    checked = _checked(options)
    with _download(model, download_path(model, options["layout"]), keep=keep_source) as download:
        checkpoint = Checkpoint.open(download.source)
        check_runnable(checkpoint, options["dense_bits"])
        if not (destination / MANIFEST_NAME).exists():
            check(checkpoint)
            announce(checkpoint, model.name, destination.parent, download=True)
        manifest = convert(
            *(download.source, destination, family_of(checkpoint.config)),
            **checked,
            progress=download.progress.converted,
            arrivals=download.shards,
        )
    _print_error(manifest)
    return manifest


@dataclass(frozen=True)
class _Download:
    """A checkpoint that is downloaded shard by shard.

    Args:
        source: its directory.
        shards: files as they arrive.
        progress: counts bytes that are downloaded and converted.
    """

    source: Path
    shards: StreamedShards
    progress: ConversionProgress


@contextmanager
def _download(model: HubModel, source: Path, *, keep: bool) -> Iterator[_Download]:
    """Downloads a checkpoint into `source`, with a bar on stderr; removes or completes it after the block.

    Raises:
        UserError: the Hub cannot be reached, or has no such model.
    """
    from edgemoe.hub.checkpoint import open_streamed

    source.mkdir(parents=True, exist_ok=True)
    kept = source / KEPT
    if keep:
        kept.touch()
    with StoreLock(source, exclusive=True), ByteProgress(f"downloading and converting {model.name}") as bar:
        progress = ConversionProgress(bar)
        shards, total = open_streamed(model, source, keep=kept.exists(), progress=progress.downloaded)
        progress.expect(total)
        yield _Download(source, shards, progress)
        if kept.exists():
            shards.complete()
        else:
            shutil.rmtree(source)


def download_path(model: HubModel, layout: str) -> Path:
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
