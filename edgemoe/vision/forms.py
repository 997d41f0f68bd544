"""Families whose pictures are understood, and the bounds of a config's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgemoe.errors import ModelRefused
from edgemoe.kernels.native import library as native
from edgemoe.machine.device import Device
from edgemoe.storage.convert.config import WRAPPED_IN, Config
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, read_json, shortened


@dataclass(frozen=True)
class VisionForm:
    """How pictures enter one family of multimodal models.

    Args:
        modules: names of the modules of transformers' multimodal model that make features of pictures.
        processor: transformers' class that makes pixels of a picture, for Pillow alone.
        inputs: tensors of the processor that the modules take.
        patch: keys of vision_config -> attributes of the processor that must have the same value.
        merge: key of vision_config: number of patches along a side of the square that becomes one token.
        bounds: key of vision_config -> largest value accepted; the smallest is 1.
        axes: whether tokens have positions in time, height and width.
        frames: how often the processor counts each pixel of a picture for its bounds.
        around: keys of config.json: the tokens before and after a picture that chat templates do not write; empty: they
            write them.
    """

    modules: tuple[str, ...]
    processor: str
    inputs: tuple[str, ...]
    patch: Mapping[str, str]
    merge: str
    bounds: Mapping[str, int]
    axes: bool = True
    frames: int = 1
    around: tuple[str, ...] = ()


_SIDES = {"hidden_size": 65_536, "intermediate_size": 262_144, "patch_size": 64}
_BLOCKS = {
    **{"depth": 512, "num_heads": 512, "out_hidden_size": 65_536, "in_channels": 4},
    **{"spatial_merge_size": 8, "temporal_patch_size": 8},
}
"""Keys of vision_config -> largest values accepted: several times the values of all known models."""

_QWEN = VisionForm(
    ("visual",),
    "Qwen2VLImageProcessorPil",
    ("pixel_values", "image_grid_thw"),
    {
        "patch_size": "patch_size",
        "spatial_merge_size": "merge_size",
        "temporal_patch_size": "temporal_patch_size",
    },
    "spatial_merge_size",
    _SIDES | _BLOCKS | {"num_position_embeddings": 1 << 20},
)
_GLM = replace(
    _QWEN, processor="Glm4vImageProcessorPil", bounds=_SIDES | _BLOCKS | {"image_size": 8192}, frames=2
)
_GEMMA = VisionForm(
    ("vision_tower", "embed_vision"),
    "Gemma4ImageProcessorPil",
    ("pixel_values", "image_position_ids"),
    {"patch_size": "patch_size", "pooling_kernel_size": "pooling_kernel_size"},
    "pooling_kernel_size",
    _SIDES
    | dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 512)
    | {"head_dim": 1024, "pooling_kernel_size": 8, "position_embedding_size": 1 << 20},
    axes=False,
    around=("boi_token_id", "eoi_token_id"),
)

FORMS = {"qwen3_vl_moe": _QWEN, "qwen3_5_moe": _QWEN, "glm4v_moe": _GLM, "gemma4": _GEMMA}
"""model_type of a multimodal model -> how pictures enter it."""


def form_of(config: Config) -> VisionForm | None:
    """Returns how pictures enter a model; None: they do not.

    Args:
        config: config.json, bounded (storage.convert.config).
    """
    return FORMS.get(config.get(WRAPPED_IN) or "")


def attends_both_ways(text: Mapping[str, Any]) -> bool:
    """Whether a picture's tokens attend to each other in both directions, in layers with a window.

    Args:
        text: the language model's part of config.json.
    """
    return text.get("use_bidirectional_attention") == "vision"


def lacks_kernel(text: Mapping[str, Any], device: Device | None) -> bool:
    """Whether pictures attend in both directions, but not the compiled kernel computes attention, which alone can.

    Args:
        text: the language model's part of config.json.
        device: the device that computes; None: the CPU.
    """
    return attends_both_ways(text) and (device is not None or not native.available())


def read_vision_config(directory: Path, form: VisionForm) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads config.json of a multimodal model, and the part about its vision tower.

    Raises:
        ModelRefused: a size is out of bounds, or is missing.
    """
    whole = read_json(directory, "config.json")
    found = whole.get("vision_config")
    if not isinstance(found, dict):
        raise ModelRefused(f"a vision_config in {directory / 'config.json'}", shortened(found), CHECK_ORIGIN)
    for key, bound in form.bounds.items():
        value = found.get(key)
        if type(value) is not int or not 1 <= value <= bound:
            wanted = (
                f"a whole number from 1 to {bound} for vision_config.{key} in {directory / 'config.json'}"
            )
            raise ModelRefused(wanted, shortened(value), CHECK_ORIGIN)
    layers = found.get("deepstack_visual_indexes") or []
    if not isinstance(layers, list) or len(layers) > found.get("depth", 0):
        wanted = f"a list of layers as vision_config.deepstack_visual_indexes in {directory / 'config.json'}"
        raise ModelRefused(wanted, shortened(layers), CHECK_ORIGIN)
    return whole, found
