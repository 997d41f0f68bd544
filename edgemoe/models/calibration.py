"""The calibration of an open store, and that of a checkpoint which ships with one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from edgemoe.errors import EdgemoeError
from edgemoe.models.store_model import StoreModel
from edgemoe.storage.store.calibration import CALIBRATION_NAME, Calibration, load_calibration
from edgemoe.storage.store.manifest import Manifest


def calibration_of(store: StoreModel, level: int) -> Calibration | None:
    """The calibration beside a store's files; one that cannot be used is logged as a warning, with its path.

    Args:
        store: an open store.
        level: highest level that is used.

    Returns:
        None where there is none that fits the store.
    """
    return calibration_beside(store.directory, store.manifest, level)


def calibration_beside(store: Path, manifest: Manifest, level: int) -> Calibration | None:
    """As calibration_of, for a store's directory."""
    layers, experts = sorted(manifest.layers), max(len(layer.records) for layer in manifest.layers.values())
    return load_calibration(store, manifest.source, level, layers, experts)


def adopt_calibration(checkpoint: Path, store: Path) -> None:
    """Copies the calibration that a checkpoint ships with into its store, where the store has none."""
    if (store / CALIBRATION_NAME).exists() or not (checkpoint / CALIBRATION_NAME).exists():
        return
    manifest = Manifest.load(store)
    if found := calibration_beside(checkpoint, manifest, manifest.max_level):
        with suppress(EdgemoeError):  # a store that only others may write to
            found.save(store)
