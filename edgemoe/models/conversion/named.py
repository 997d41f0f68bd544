"""Converts a model by its name or path; says which names are models on the Hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

from edgemoe.errors import UserError
from edgemoe.hub.name import HubModel
from edgemoe.models.conversion.run import Options, convert_checkpoint, convert_from_hub
from edgemoe.storage.store.manifest import Manifest


def convert_named(
    source: Path, destination: Path, *, keep_source: bool = False, **options: Unpack[Options]
) -> Manifest:
    """Converts a checkpoint's directory, or a model of the Hub by its name. A directory goes first.

    Raises:
        UserError: also for keep_source with a directory, which is never removed, and, before anything is read, for a
            destination that cannot be a directory.
    """
    _require_directory(destination)
    hub = hub_model(source, keep_source)
    if hub:
        return convert_from_hub(hub, destination, keep_source=keep_source, **options)
    return convert_checkpoint(source, destination, **options)


def _require_directory(destination: Path) -> None:
    """Refuses a destination that is no directory, or that this user may not make or write to."""
    existing = next(path for path in (destination, *destination.absolute().parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        return
    found = "a directory that this user may not write to" if existing.is_dir() else "a file"
    raise UserError(f"a directory for a store at {destination}", f"{found} at {existing}", "choose another")


def hub_model(model: Path, keep_source: bool) -> HubModel | None:
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
