"""Converts a checkpoint on disk, or a model of the Hub while it is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, Unpack

from edgemoe.console.progress import ByteProgress
from edgemoe.console.width import say
from edgemoe.errors import UserError
from edgemoe.families.head import HeadFamily, head_of
from edgemoe.families.table import family_of, require_known
from edgemoe.models.calibration import adopt_calibration
from edgemoe.models.conversion.download import Download, choose_layout, download, download_path
from edgemoe.models.conversion.first_codes import AS_ROUNDED, FirstCodes
from edgemoe.models.conversion.first_use import announce
from edgemoe.models.conversion.growth import tell_growth
from edgemoe.models.conversion.source_lines import source_lines
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.run import convert
from edgemoe.storage.convert.source_table import SourceRow
from edgemoe.storage.store.manifest import DENSE_BITS, MANIFEST_NAME, Manifest
from edgemoe.vision.forms import form_of

if TYPE_CHECKING:
    from edgemoe.hub.name import HubModel

Check = Callable[[Checkpoint], object]
"""Raises an EdgemoeError for a checkpoint that is not to be converted; reads no weights."""


class Options(TypedDict):
    """The options of a conversion.

    Args:
        max_level: 8, 4, or None for the highest level that the source's precision justifies.
        layout: a name, or `auto`.
        dense_bits: one of manifest.DENSE_BITS.
        head_bits: one of dense_shapes.HEAD_BITS; 8 by default.
        no_vision: the vision tower of a multimodal model is left out; by default it is stored.
    """

    max_level: int | None
    layout: str
    dense_bits: int
    head_bits: NotRequired[int]
    no_vision: NotRequired[bool]


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
        options: how the checkpoint is converted.

    Raises:
        UserError, DamagedData, DoesNotFit: from storage.convert.run.convert.
    """
    from edgemoe.models.runnable import check_runnable

    checked = _checked(options)
    require_known(source)
    checkpoint = Checkpoint.open(source)
    checked |= _vision(checkpoint, options)
    check_runnable(checkpoint, *_bits(options))
    check(checkpoint)
    family, table = family_of(checkpoint.config), list[SourceRow]()
    tell_growth(checkpoint, options["max_level"], *_bits(options))
    with ByteProgress(f"converting {source.name}") as bar:
        how = checked | {"progress": bar.update, "tell": table.extend}
        manifest = convert(source, destination, family, head=_head(checkpoint), **how)
    adopt_calibration(source, destination)
    _print_error(manifest, table)
    return manifest


def convert_from_hub(
    model: HubModel,
    destination: Path,
    *,
    keep_source: bool = False,
    check: Check = lambda checkpoint: None,
    codes: FirstCodes = AS_ROUNDED,
    **options: Unpack[Options],
) -> Manifest:
    """Downloads a model shard by shard and converts each shard before the next, with a bar on stderr.

    Resumes an interrupted call. Leaves a finished store of the same model unchanged.

    Args:
        model, destination: its name on the Hub, and the store's directory.
        keep_source: keeps the whole checkpoint in downloads_directory().
        check: may refuse the checkpoint by its headers, before weights are downloaded.
        codes: may keep the checkpoint, and then chooses the bits of dense weights.
        options: how the checkpoint is converted.

    Raises:
        UserError: the Hub cannot be reached, or has no such model.
        DamagedData, DoesNotFit: from storage.convert.run.convert, or a failed download.
    """
    from edgemoe.models.runnable import check_runnable

    table, path = list[SourceRow](), download_path(model, _checked(options)["layout"].name)
    with download(model, path, keep=keep_source) as arriving:
        checkpoint = Checkpoint.open(arriving.source)
        options["dense_bits"] = codes.conversion_bits(checkpoint, options["dense_bits"])
        check_runnable(checkpoint, *_bits(options))
        if not (destination / MANIFEST_NAME).exists():
            check(checkpoint)
            announce(checkpoint, model.name, destination.parent, download=True)
            _begin(arriving, checkpoint, model, options, codes)
        how = _checked(options) | _vision(checkpoint, options) | _telling(arriving, table)
        family, head = family_of(checkpoint.config), _head(checkpoint)
        manifest = convert(arriving.source, destination, family, head=head, **how)
    _print_error(manifest, table)
    return manifest


def _head(checkpoint: Checkpoint) -> HeadFamily | None:
    """The names of a checkpoint's head for further tokens; None: it has none that this program runs."""
    return head_of(family_of(checkpoint.config), checkpoint.config, checkpoint.names())


def _telling(arriving: Download, table: list[SourceRow]) -> dict[str, Any]:
    """Arguments of `convert` that follow a download: its bar, its shards, and the table of what is converted."""
    return {"progress": arriving.progress.converted, "arrivals": arriving.shards, "tell": table.extend}


def _begin(
    arriving: Download, checkpoint: Checkpoint, model: HubModel, options: Options, codes: FirstCodes
) -> None:
    """Prints what a download takes, and keeps its checkpoint where its codes will be calibrated."""
    tell_growth(checkpoint, options["max_level"], *_bits(options))
    if codes.planned(checkpoint):
        arriving.retain()
        codes.begin(checkpoint, arriving.source, model.name)


def _print_error(manifest: Manifest, table: Sequence[SourceRow]) -> None:
    """Prints the relative error of a conversion against its source on stderr, and what it did with each type."""
    for line in source_lines(table):
        say(line)
    if manifest.source_error is not None:
        say(
            f"converted to {manifest.max_level} bits per weight; weights differ from the source's by "
            f"{100 * manifest.source_error:.2g} % on average, as two experts of each layer show"
        )


def _bits(options: Options) -> tuple[int, int]:
    """Bits of dense weights, and of embedding and head."""
    return options["dense_bits"], options.get("head_bits", 8)


def _checked(options: Options) -> dict[str, Any]:
    """The options as storage.convert.run.convert takes them; raises UserError for a wrong one."""
    level, bits = options["max_level"], options["dense_bits"]
    if level not in (None, 8, 4):
        raise UserError("8 or 4 as highest level", str(level), "choose --max-level 8 or 4")
    if bits not in DENSE_BITS:
        wanted = "bf16, 8, 6, 5 or 4 bits for the dense weights"
        raise UserError(wanted, str(bits), "choose --dense-bits bf16 or 8")
    given = {name: value for name, value in options.items() if name != "no_vision"}
    return given | {"layout": choose_layout(options["layout"])}


def _vision(checkpoint: Checkpoint, options: Options) -> dict[str, Any]:
    """The argument of `convert` that names the modules of a vision tower that is stored."""
    form = None if options.get("no_vision") else form_of(checkpoint.config)
    return {"vision": form.modules if form else ()}
