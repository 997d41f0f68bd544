"""The results of a calibration so far, in a file from which a killed run goes on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgemoe.calibrate.windows import Window
from edgemoe.errors import DamagedData
from edgemoe.experts.output_errors import OutputErrors
from edgemoe.storage.files.array_file import read_arrays, write_arrays

UNFINISHED_NAME = "calibration-unfinished.safetensors"


class CalibrationState:
    """Windows of tokens, sums over finished ones, routers' choices in them, and KL of the layers disturbed so far.

    Args:
        directory: the directory of the store.
        run: the settings of the run; a file of another run is not used.
        errors: sums of the experts' errors; replaced by the sums in the file.

    Attributes:
        windows: token ids of the windows to measure on, as far as they are known.
        choices: the routers' choices, (chosen [layers, T, k], gates [layers, T, k]), for each window whose errors
            are in the sums.
        kl: float64 [layers], sums over tokens; of the layers disturbed.
        disturbed: number of (window, layer) pairs done.
    """

    def __init__(self, directory: Path, run: dict[str, Any], errors: OutputErrors) -> None:
        self._path, self._run, self.errors = directory / UNFINISHED_NAME, run, errors
        layers = len(errors.layers)
        self.disturbed = 0
        self.windows: list[Window] = []
        self.choices: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.kl = torch.zeros(layers, dtype=torch.float64)
        with suppress(DamagedData, KeyError, ValueError, RuntimeError):
            self._load()

    def _load(self) -> None:
        description, arrays = read_arrays(self._path)
        if description["run"] != self._run:
            return
        found = {name: torch.from_numpy(array) for name, array in arrays.items() if array.dtype != np.uint16}
        if "chosen" in arrays:
            chosen = torch.from_numpy(arrays["chosen"].astype(np.int64))
            self.choices = list(zip(chosen, found["gates"], strict=True))
        self.errors.squared.copy_(found["squared"])
        self.errors.counts.copy_(found["counts"])
        self.kl.copy_(found["kl"])
        self.windows = [*map(tuple, arrays["windows"].tolist())]
        self.disturbed = int(description["disturbed"])

    def save(self) -> None:
        """Writes the file atomically.

        Raises:
            DoesNotFit: the disk is full.
            WriteFailed: the operating system refused a write.
        """
        arrays = {
            "windows": np.array(self.windows, np.int64),
            "squared": self.errors.squared.numpy(),
            "counts": self.errors.counts.numpy(),
            "kl": self.kl.numpy(),
        }
        if self.choices:
            chosen, gates = (torch.stack(each) for each in zip(*self.choices, strict=True))
            arrays |= {"chosen": chosen.numpy().astype(np.uint16), "gates": gates.numpy()}
        write_arrays(self._path, {"run": self._run, "disturbed": self.disturbed}, arrays)

    def remove(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)
