"""Families whose pictures are understood, and the bounds of a config's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgemoe.errors import ModelRefused
from edgemoe.storage.convert.config import WRAPPED_IN, Config
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, read_json, shortened


@dataclass(frozen=True)
class VisionForm:
    """How pictures enter one family of multimodal models.

    Args:
        modules: names of the modules of transformers' multimodal model that make features of pictures.
        processor: transformers' class that makes pixels of a picture, for Pillow alone.
        patch: keys of vision_config -> attributes of the processor that must have the same value.
    """

    modules: tuple[str, ...]
    processor: str
    patch: Mapping[str, str]


_QWEN = VisionForm(
    ("visual",),
    "Qwen2VLImageProcessorPil",
    {
        "patch_size": "patch_size",
        "spatial_merge_size": "merge_size",
        "temporal_patch_size": "temporal_patch_size",
    },
)

FORMS = {"qwen3_vl_moe": _QWEN, "qwen3_5_moe": _QWEN}
"""model_type of a multimodal model -> how pictures enter it."""

_BOUNDS = {
    **dict.fromkeys(("depth", "num_heads"), 512),
    **dict.fromkeys(("hidden_size", "out_hidden_size"), 65_536),
    **{"intermediate_size": 262_144, "num_position_embeddings": 1 << 20, "in_channels": 4},
    **{"patch_size": 64, "spatial_merge_size": 8, "temporal_patch_size": 8},
}
"""Key of vision_config -> largest value accepted; the smallest is 1. Several times the values of all known models."""


def form_of(config: Config) -> VisionForm | None:
    """Returns how pictures enter a model; None: they do not.

    Args:
        config: config.json, bounded (storage.convert.config).
    """
    return FORMS.get(config.get(WRAPPED_IN) or "")


def read_vision_config(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads config.json of a multimodal model, and the part about its vision tower.

    Raises:
        ModelRefused: a size is out of bounds, or is missing.
    """
    whole = read_json(directory, "config.json")
    found = whole.get("vision_config")
    if not isinstance(found, dict):
        raise ModelRefused(f"a vision_config in {directory / 'config.json'}", shortened(found), CHECK_ORIGIN)
    for key, bound in _BOUNDS.items():
        value = found.get(key)
        if type(value) is not int or not 1 <= value <= bound:
            wanted = (
                f"a whole number from 1 to {bound} for vision_config.{key} in {directory / 'config.json'}"
            )
            raise ModelRefused(wanted, shortened(value), CHECK_ORIGIN)
    layers = found.get("deepstack_visual_indexes") or []
    if not isinstance(layers, list) or len(layers) > found["depth"]:
        wanted = f"a list of layers as vision_config.deepstack_visual_indexes in {directory / 'config.json'}"
        raise ModelRefused(wanted, shortened(layers), CHECK_ORIGIN)
    return whole, found
