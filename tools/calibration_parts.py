"""Makes copies of a calibrated store whose calibration lacks a part, to measure what the part is worth.

    python -m tools.calibration_parts STORE

Next to STORE come, of hard links but for the calibration: STORE-alone (every layer as sensitive as the others),
STORE-mean (each expert has its layer's mean error), STORE-typical (every expert has the errors of typical weights) and
STORE-random (no calibration: errors are measured on random tokens at first use). `edgemoe eval` measures them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from edgemoe.errors import EdgemoeError, UserError
from edgemoe.policy.damage import TYPICAL_ERROR
from edgemoe.storage.base import LEVELS
from edgemoe.storage.store.calibration import CALIBRATION_NAME, Calibration
from tools.command_line import failed, make_parser


def without_parts(whole: Calibration) -> dict[str, Calibration | None]:
    """The calibrations by what they are named for; None: none."""
    error, alike = whole.error, np.ones_like(whole.sensitivity)
    mean = np.broadcast_to(error.mean(1, keepdims=True), error.shape).astype(error.dtype)
    squares = np.array([TYPICAL_ERROR[level] ** 2 for level in LEVELS], error.dtype)
    return {
        "alone": replace(whole, sensitivity=alike),
        "mean": replace(whole, error=mean),
        "typical": replace(whole, error=np.broadcast_to(squares, error.shape).copy(), sensitivity=alike),
        "random": None,
    }


def copy_store(store: Path, to: Path, calibration: Calibration | None) -> None:
    """Links the model's files of a store into a new directory, and writes another calibration there.

    Raises:
        UserError: `to` is there.
    """
    try:
        to.mkdir()
    except FileExistsError as error:
        raise UserError(f"no file at {to}", "one", "remove it first") from error
    for file in store.iterdir():
        if file.is_file() and file.name != CALIBRATION_NAME:
            os.link(file, to / file.name)
    if calibration:
        calibration.save(to)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.calibration_parts", __doc__)
    parser.add_argument("store", type=Path, help="a calibrated store")
    store: Path = parser.parse_args(argv).store
    try:
        for name, calibration in without_parts(Calibration.read(store)).items():
            copy_store(store, store.with_name(f"{store.name}-{name}"), calibration)
    except EdgemoeError as error:
        return failed("tools.calibration_parts", error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
