"""Quantized checkpoints in tests/data/formats, opened by their own settings or changed ones."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.formats import open_weights

DATA = Path(__file__).parents[2] / "data" / "formats"
EXPERT = "model.layers.0.mlp.experts.0."


def opened(directory: Path, settings: object):
    """Returns (format's name, weights) of a directory with this quantization_config in config.json."""
    config = {} if settings is None else {"quantization_config": settings}
    return open_weights(config, StoredTensors.open(directory))


def settings_of(name: str) -> dict:
    return json.loads((DATA / name / "quantization_config.json").read_text())


def rewrite(directory: Path, change) -> None:
    """Saves the tensors again with the changes of `change`."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
