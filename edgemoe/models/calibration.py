"""The calibration of an open store, and that of a checkpoint which ships with one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from edgemoe.models.store_model import StoreModel
from storage.calibration import CALIBRATION_NAME, Calibration, load_calibration
from storage.errors import EdgemoeError
from storage.manifest import Manifest


def calibration_of(store: StoreModel, level: int) -> Calibration | None:
    """The calibration beside a store's files; one that cannot be used is logged as a warning, with its path.

    Args:
        store: an open store.
        level: highest level that is used.

    Returns:
        None where there is none that fits the store.
    """
    manifest, experts = store.manifest, store.shape.experts_per_layer
    return load_calibration(store.directory, manifest.source, level, sorted(manifest.layers), experts)


def adopt_calibration(checkpoint: Path, store: Path) -> None:
    """Copies the calibration that a checkpoint ships with into its store, where the store has none."""
    if (store / CALIBRATION_NAME).exists() or not (checkpoint / CALIBRATION_NAME).exists():
        return
    manifest = Manifest.load(store)
    layers, experts = sorted(manifest.layers), max(len(layer.records) for layer in manifest.layers.values())
    found = load_calibration(checkpoint, manifest.source, manifest.max_level, layers, experts)
    if found:
        with suppress(EdgemoeError):  # a store that only others may write to
            found.save(store)
