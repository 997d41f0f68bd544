"""Source formats of a checkpoint's weights, and the choice of one by config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storage.errors import ModelRefused
from storage.formats.autoround import open_autoround
from storage.formats.awq import open_awq
from storage.formats.base import Opener, Settings, Weight
from storage.formats.compressed import open_compressed
from storage.formats.fp8 import open_fp8
from storage.formats.gptq import open_gptq
from storage.formats.mxfp4 import open_mxfp4
from storage.formats.plain import open_plain
from storage.tensors import StoredTensors
from storage.untrusted import CHECK_ORIGIN, USE_SOURCE, shortened


@dataclass(frozen=True)
class Format:
    """A source format.

    Args:
        name: in messages and documents.
        method: quant_method in config.json's quantization_config; None: config.json has no quantization_config.
        variants: supported variants.
        stored: stored form of the experts.
        open: builds the model's tensors from the stored ones; None for a file type other than safetensors.
    """

    name: str
    method: str | None
    variants: str
    stored: str
    open: Opener | None


GGUF = "GGUF"
"""Name of the format that is a file type, which Checkpoint recognises by its suffix."""

_CODES = "its 4-bit codes exactly, at level 4; anything else at level 8"
_FLOATS = "level 8"

FORMATS = (
    Format("safetensors", None, "bf16, fp16, fp32; one file or shards with an index", _FLOATS, open_plain),
    Format("FP8", "fp8", "E4M3 with a scale per block, or per matrix", _FLOATS, open_fp8),
    Format(
        "GPTQ", "gptq", "4, 8 and 2 bits, v1 and v2, any group; with act-order at level 8", _CODES, open_gptq
    ),
    Format(
        "AutoRound",
        "auto-round",
        "packed as GPTQ (auto_round, auto_gptq, gptqmodel) or AWQ",
        _CODES,
        open_autoround,
    ),
    Format("AWQ", "awq", "4 bits, version gemm, any group", _CODES, open_awq),
    Format(
        "compressed-tensors",
        "compressed-tensors",
        "int4 and int8 packed, int8 and FP8 by row, group, block or matrix",
        _CODES,
        open_compressed,
    ),
    Format(
        "MXFP4",
        "mxfp4",
        "gpt-oss's blocks and scales",
        _FLOATS + ": its values are not evenly spaced",
        open_mxfp4,
    ),
    Format(
        GGUF,
        None,
        "one file of F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K to Q6_K, IQ4_NL, IQ4_XS or MXFP4, with its "
        "tokenizer and chat template; architectures qwen3moe and llama with experts (Mixtral)",
        "the 4-bit codes of Q4_0, Q4_1 and Q4_K exactly, at level 4, if all experts have them; otherwise level 8",
        None,
    ),
)
"""Every supported format."""


def open_weights(config: Mapping[str, Any], tensors: StoredTensors) -> tuple[str, dict[str, Weight]]:
    """Returns the name of the format that a config names, and the model's tensors by transformers' names.

    Raises:
        ModelRefused: a format outside of FORMATS, or settings out of bounds.
        MissingTensor: a part of a quantized matrix is missing or has the wrong shape.
    """
    settings: Settings | None = config.get("quantization_config")
    if settings is not None and not isinstance(settings, dict):
        raise ModelRefused(
            "an object as quantization_config in config.json", shortened(settings), CHECK_ORIGIN
        )
    method = None if settings is None else settings.get("quant_method")
    for known in FORMATS:
        if known.open and known.method == method and (settings is None or method is not None):
            return known.name, known.open(settings or {}, tensors)
    raise ModelRefused(
        f"a format among {', '.join(row.name for row in FORMATS)}",
        f"quant_method {shortened(method)} in config.json",
        USE_SOURCE,
    )
