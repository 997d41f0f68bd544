"""Source formats of a checkpoint's weights, and the choice of one by config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgemoe.errors import ModelRefused
from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, USE_SOURCE, shortened
from edgemoe.storage.formats.autoround import open_autoround
from edgemoe.storage.formats.awq import open_awq
from edgemoe.storage.formats.base import Opener, Settings, Weight
from edgemoe.storage.formats.compressed import open_compressed
from edgemoe.storage.formats.fp8 import open_fp8
from edgemoe.storage.formats.gptq import open_gptq
from edgemoe.storage.formats.mxfp4 import open_mxfp4
from edgemoe.storage.formats.plain import open_plain

SAFETENSORS = "safetensors"
"""Name of the format of a checkpoint whose config.json has no quantization_config."""

GGUF = "GGUF"
"""Name of the format that is a file type, which Checkpoint recognises by its suffix."""

OPENERS: dict[str, tuple[str, Opener]] = {
    "fp8": ("FP8", open_fp8),
    "gptq": ("GPTQ", open_gptq),
    "auto-round": ("AutoRound", open_autoround),
    "awq": ("AWQ", open_awq),
    "compressed-tensors": ("compressed-tensors", open_compressed),
    "mxfp4": ("MXFP4", open_mxfp4),
}
"""quant_method in config.json's quantization_config -> (name of the format, its opener)."""

_OLD_SETTINGS = ("quantize_config.json", "quant_config.json")
"""Files in which old quantizers wrote what is now quantization_config."""

FORMATS = (SAFETENSORS, *(name for name, _ in OPENERS.values()), GGUF)
"""Names of every supported format; tools/support_table.py describes them."""


def open_weights(config: Mapping[str, Any], tensors: StoredTensors) -> tuple[str, dict[str, Weight]]:
    """Returns the name of the format that a config names, and the model's tensors by transformers' names.

    Raises:
        ModelRefused: a format outside of FORMATS, or settings out of bounds.
        MissingTensor: a part of a quantized matrix is missing or has the wrong shape.
    """
    settings: Settings | None = config.get("quantization_config")
    if settings is None:
        for name in _OLD_SETTINGS:
            if (tensors.directory / name).exists():
                raise ModelRefused(
                    f"a quantization_config in config.json of {tensors.directory}",
                    f"none, and {name}, as of quantizers that are no longer maintained",
                    f"copy the contents of {name} into config.json as quantization_config, with its quant_method",
                )
        return SAFETENSORS, open_plain(tensors)
    if not isinstance(settings, dict):
        raise ModelRefused(
            "an object as quantization_config in config.json", shortened(settings), CHECK_ORIGIN
        )
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in OPENERS:
        raise ModelRefused(
            f"a format among {', '.join(FORMATS)}",
            f"quant_method {shortened(method)} in config.json",
            USE_SOURCE,
        )
    name, opener = OPENERS[method]
    return name, opener(settings, tensors)
