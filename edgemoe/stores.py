"""From what a user names as a model to a store: a store is used as it is, a checkpoint is converted once."""

from __future__ import annotations

import re
from pathlib import Path

import platformdirs

from edgemoe.families import family_of
from edgemoe.progress import ByteProgress
from storage.base import PLANES_OF_LEVEL
from storage.checkpoint import Checkpoint
from storage.convert import convert
from storage.errors import UserError
from storage.layout import LAYOUTS, Layout, detect
from storage.manifest import MANIFEST_NAME, Manifest


def choose_layout(name: str) -> Layout:
    """The layout of a name; `auto` is what this machine's kernel uses."""
    if name == "auto":
        return detect()
    if name not in LAYOUTS:
        raise UserError("a layout was wanted", f"got {name!r}", f"Choose auto or one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def convert_checkpoint(
    source: Path, destination: Path, *, max_level: int, layout: str, dense_bits: int
) -> Manifest:
    """Converts with a progress bar on stderr.

    Raises:
        UserError, DamagedData, DoesNotFit: as storage.convert.convert.
    """
    if max_level not in PLANES_OF_LEVEL or max_level < 4:
        raise UserError("a highest level was wanted", f"got {max_level}", "Choose --max-level 8 or 4")
    if dense_bits not in (16, 8):
        raise UserError(
            "bits of the dense weights were wanted", f"got {dense_bits}", "Choose --dense-bits 16 or 8"
        )
    with ByteProgress(f"converting {source.name}") as progress:
        return convert(
            source,
            destination,
            family_of(Checkpoint.open(source).config),
            max_level=max_level,
            layout=choose_layout(layout),
            dense_bits=dense_bits,
            progress=progress.update,
        )


def resolve_store(model: Path) -> Path:
    """The store directory for `model`: itself, or the cached conversion of a checkpoint, made now if need be.

    Raises:
        UserError: `model` is neither.
    """
    if (model / MANIFEST_NAME).exists():
        return model
    if not (model / "config.json").exists():
        found = (
            "no such directory"
            if not model.is_dir()
            else "a directory with neither store.json nor config.json"
        )
        raise UserError(
            f"a model was wanted at {model}",
            found,
            "Give a checkpoint directory or one made by `edgemoe convert`",
        )
    checkpoint = Checkpoint.open(model)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", model.resolve().name)
    cache = Path(platformdirs.user_cache_dir("edgemoe")) / "stores"
    store = cache / f"{name}-{checkpoint.fingerprint()[:16]}-{detect().name}"
    if not (store / MANIFEST_NAME).exists():
        convert_checkpoint(model, store, max_level=8, layout="auto", dense_bits=16)
    return store
