"""Reads the calibration of a store, and copies the one that a checkpoint ships with."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from edgemoe.errors import DamagedData, EdgemoeError
from edgemoe.policy.damage import Damage
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.store.calibration import (
    CALIBRATION_NAME,
    Calibration,
    fitting_calibration,
    load_calibration,
)
from edgemoe.storage.store.manifest import Manifest


def calibration_of(store: Path, manifest: Manifest, level: int) -> Calibration | None:
    """The calibration of a store; one that cannot be used is logged as a warning, with its path.

    Args:
        store: its directory.
        manifest: its store.json.
        level: highest level that is used.

    Returns:
        None where there is none that fits the store.
    """
    return load_calibration(store, manifest.coded_source, level, *_sizes(manifest))


def damage_of(store: Path, manifest: Manifest, settings: RunSettings) -> Damage | None:
    """The damage of fewer bits of each expert, where settings need it and the store has a calibration that fits."""
    if not (settings.priced and manifest.layers):
        return None
    with suppress(DamagedData):  # the engine names the file
        found = fitting_calibration(store, manifest.coded_source, settings.levels[0], *_sizes(manifest))
        return Damage.of(found) if found else None
    return None


def _sizes(manifest: Manifest) -> tuple[list[int], int]:
    """The layers with experts, and how many each has."""
    return sorted(manifest.layers), max(len(layer.records) for layer in manifest.layers.values())


def adopt_calibration(checkpoint: Path, store: Path) -> None:
    """Copies the calibration that a checkpoint ships with into its store, where the store has none."""
    if (store / CALIBRATION_NAME).exists() or not (checkpoint / CALIBRATION_NAME).exists():
        return
    manifest = Manifest.load(store)
    if manifest.codes:  # it was measured on other codes
        return
    if found := calibration_of(checkpoint, manifest, manifest.max_level):
        with suppress(EdgemoeError):  # a store that only others may write to
            found.save(store)
