"""Resolves a model's name to a store: a store is used in place, any other model is converted once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from edgemoe.errors import UserError
from edgemoe.hub.name import HubModel
from edgemoe.models.cache import touch
from edgemoe.models.calibration import adopt_calibration
from edgemoe.models.conversion.dense_default import DENSE_BITS, dense_bits_for, head_bits_for
from edgemoe.models.conversion.download import choose_layout, download_path
from edgemoe.models.conversion.first_codes import FirstCodes
from edgemoe.models.conversion.first_use import announce
from edgemoe.models.conversion.run import Check, Options, convert_checkpoint, convert_from_hub
from edgemoe.models.conversion.waiting import convert_once
from edgemoe.models.place import Place, locate
from edgemoe.models.published.announced import announced_checkpoint, announced_name
from edgemoe.storage.convert.checkpoint import Checkpoint


def resolve_store(
    model: Path,
    layout: str = "auto",
    *,
    keep_source: bool = False,
    check: Check = lambda checkpoint: None,
    dense_bits: int | None = None,
    calibrate: bool = False,
) -> Path:
    """Returns the store of `model`: the model itself, or its cached conversion, made now if it is missing.

    A long conversion is announced on stderr. While another process converts the model this one waits for it.

    Args:
        model: a store, a checkpoint, the name of a model on the Hub, or a name that `edgemoe models` prints.
        layout: how a conversion lays out records.
        keep_source: keeps the downloaded checkpoint; downloads it even if the store exists.
        check: may refuse a conversion by the checkpoint's headers, before it begins.
        dense_bits: bits of the dense weights, one of manifest.DENSE_BITS; None: the default, or the store's own.
        calibrate: calibrates the codes of a new store where that takes less than first_codes.LONGEST.

    Raises:
        UserError: no such model, several whose names begin so, keep_source without a model of the Hub, or a store with
            other dense_bits.
    """
    place = locate(model, layout, keep_source)
    _require_dense_bits(place, dense_bits)
    bits = dense_bits or dense_bits_for(place.store)
    options = Options(max_level=None, layout=layout, dense_bits=bits, head_bits=head_bits_for(place.store))
    codes = FirstCodes(place.store, choose_layout(layout).name, dense_bits, calibrate)
    if place.hub:
        _convert_hub(place.hub, place, keep_source, check, options, codes)
    elif place.checkpoint:
        _convert_on_disk(model, place, check, options, codes)
    if place.store != model:  # a store by its path is used as it is, also by the calibration itself
        codes.finish()
    touch(place.store)
    return place.store


def _convert_hub(
    hub: HubModel, place: Place, keep_source: bool, check: Check, options: Options, codes: FirstCodes
) -> None:
    """Converts a model of the Hub where its store is unfinished, or its source is to be kept."""
    convert_once(
        place.name,
        place.store,
        lambda: keep_source or not place.finished,
        lambda: convert_from_hub(
            hub, place.store, keep_source=keep_source, check=check, codes=codes, **options
        ),
        download=download_path(hub, options["layout"]),
    )


def _convert_on_disk(model: Path, place: Place, check: Check, options: Options, codes: FirstCodes) -> None:
    """Converts a checkpoint whose store is unfinished, and announces it; copies its calibration into the store."""

    def accept(checkpoint: Checkpoint) -> None:
        check(checkpoint)
        announce(checkpoint, place.name, place.store.parent)
        codes.begin(checkpoint, model, place.name)

    def convert() -> None:
        if place.checkpoint:
            options["dense_bits"] = codes.conversion_bits(place.checkpoint, options["dense_bits"])
        convert_checkpoint(model, place.store, check=accept, **options)

    convert_once(place.name, place.store, lambda: not place.finished, convert)
    adopt_calibration(model, place.store)


def _require_dense_bits(place: Place, bits: int | None) -> None:
    """Refuses a store that was made, or begun, with other bits of dense weights than an option says."""
    if bits and (found := dense_bits_for(place.store, bits)) != bits:
        raise UserError(
            f"dense weights of {bits} bits in the store of {place.name}",
            f"{found} bits in {place.store}",
            f"leave --dense-bits out, or remove the store with `edgemoe rm {place.store.name}` first",
        )


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
    place = locate(model, layout, keep_source=False)
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
