"""calibration.safetensors: the quality that fewer bits of each expert cost, measured on tokens.

The file lies next to a store's, or next to a checkpoint that ships with one. store.json does not list it, so it can be
added, replaced and removed at any time. It belongs to the checkpoint that the store was converted from, in any layout.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgemoe.errors import BadManifest, DamagedData
from edgemoe.storage.base import LEVELS
from edgemoe.storage.files.array_file import read_arrays, write_arrays
from edgemoe.storage.files.untrusted import shortened

CALIBRATION_NAME = "calibration.safetensors"

FORMAT_VERSION = 1

TEXT, WRITTEN, RANDOM = "text", "tokens that the model wrote", "random tokens"
"""Tokens that a calibration was measured on."""

SAMPLE_BYTES = 2_000_000
"""Most bytes of routers' choices and gate weights that a calibration keeps."""

_log = logging.getLogger("edgemoe")
_ACTION = "run `edgemoe calibrate` to write it again"


@dataclass(frozen=True)
class Calibration:
    """Measurements of a model's experts.

    Args:
        source: fingerprint of the checkpoint.
        max_level: highest level of the store that was measured; its outputs stand for the model's own.
        origin: TEXT, WRITTEN or RANDOM.
        text: name of the text's file; empty without one.
        tokens: measured.
        layers: numbers of the layers with experts, ascending.
        error: float32 [layers, experts, levels], mean over tokens of the squared difference of an expert's output at
            each of LEVELS, summed over the H numbers of an output; at level 0 the squared output itself.
        sensitivity: float32 [layers], KL of the final distribution per squared difference of the experts' sum.
        chosen: uint16 [layers, sample, k], routers' choices for some of the tokens, in their order.
        gates: float16 [layers, sample, k], their gate weights.
    """

    source: str
    max_level: int
    origin: str
    text: str
    tokens: int
    layers: tuple[int, ...]
    error: npt.NDArray[np.float32]
    sensitivity: npt.NDArray[np.float32]
    chosen: npt.NDArray[np.uint16]
    gates: npt.NDArray[np.float16]

    @property
    def measured_on(self) -> str:
        """The tokens, for people: "2,048 tokens of a.txt", "512 random tokens"."""
        return (
            f"{self.tokens:,} tokens of {self.text}"
            if self.origin == TEXT
            else f"{self.tokens:,} {self.origin}"
        )

    def save(self, directory: Path) -> None:
        """Writes the file into a directory, atomically; equal calibrations give equal bytes.

        Raises:
            DoesNotFit: the disk is full.
            WriteFailed: the operating system refused a write.
        """
        fields = ("source", "max_level", "origin", "text", "tokens", "layers")
        description = {"format": FORMAT_VERSION} | {name: getattr(self, name) for name in fields}
        arrays = {name: getattr(self, name) for name in ("error", "sensitivity", "chosen", "gates")}
        write_arrays(directory / CALIBRATION_NAME, description, arrays)

    @classmethod
    def read(cls, directory: Path) -> Calibration:
        """Reads the file of a directory, and checks it as far as possible without the model.

        Raises:
            DamagedData: no such file, or a damaged one, or one of a newer format; with the file.
        """
        path = directory / CALIBRATION_NAME
        description, arrays = read_arrays(path)
        try:
            return cls._checked(description, arrays)
        except (ValueError, TypeError, KeyError) as error:
            raise BadManifest(f"a valid calibration in {path}", str(error)[:200], _ACTION) from error

    @classmethod
    def _checked(cls, description: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Calibration:
        values = dict(description)
        if values.pop("format") != FORMAT_VERSION:
            raise ValueError(
                f"format {shortened(description['format'])}, not {FORMAT_VERSION}, which this edgemoe reads"
            )
        contents: dict[str, Any] = {**values, "layers": tuple(values["layers"]), **arrays}
        made = cls(**contents)
        layers, (_, sample, slots) = len(made.layers), made.chosen.shape
        experts = made.error.shape[1]
        shapes = {
            "error": (layers, experts, len(LEVELS)),
            "sensitivity": (layers,),
            "chosen": (layers, sample, slots),
            "gates": (layers, sample, slots),
        }
        for name, shape in shapes.items():
            array = getattr(made, name)
            if array.shape != shape or not array.size or not np.isfinite(array).all() or (array < 0).any():
                raise ValueError(f"{name} of shape {array.shape}, not finite numbers of shape {shape}")
        if list(made.layers) != sorted({int(layer) for layer in made.layers}):
            raise ValueError(f"layers {shortened(made.layers)}, not ascending numbers")
        if made.chosen.max() >= experts:
            raise ValueError(f"expert {made.chosen.max()} of {experts}")
        return made


def load_calibration(
    directory: Path, source: str, max_level: int, layers: list[int], experts: int
) -> Calibration | None:
    """Reads the calibration in a directory. One that cannot be used is logged as a warning, with its path.

    Args:
        directory, source, max_level, layers, experts: see fitting_calibration.

    Returns:
        the calibration; None where there is no file, or one that is damaged, newer or of another model.
    """
    try:
        return fitting_calibration(directory, source, max_level, layers, experts)
    except DamagedData as error:
        _log.warning("%s is not used: %s", directory / CALIBRATION_NAME, error)
        return None


def fitting_calibration(
    directory: Path, source: str, max_level: int, layers: list[int], experts: int
) -> Calibration | None:
    """Reads the calibration in a directory.

    Args:
        directory: the directory of a store or a checkpoint.
        source: fingerprint of the checkpoint.
        max_level: highest level that is used.
        layers: numbers of the layers with experts.
        experts: number of experts in each layer.

    Returns:
        None where there is no file.

    Raises:
        DamagedData: the file is damaged, newer or of another model.
    """
    if not (directory / CALIBRATION_NAME).exists():
        return None
    found = Calibration.read(directory)
    shape = list(found.layers), found.error.shape[1]
    if found.source != source or found.max_level < max_level or shape != (layers, experts):
        raise BadManifest(
            f"a calibration of {source} up to level {max_level}",
            f"one of {shortened(found.source)} up to level {found.max_level}",
            _ACTION,
        )
    return found
