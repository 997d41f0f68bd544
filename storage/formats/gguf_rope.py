"""Rotary embeddings of a GGUF file, with the values that llama.cpp has where the file has none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgemoe.errors import ModelRefused
from edgemoe.storage.files.untrusted import shortened

_BETAS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
"""Field after rope.scaling -> key of transformers' rotary parameters."""

_LATENT_MULTIPLIER = 0.1
"""Factor on yarn_log_multiplier in files of DeepSeek's models, which llama.cpp's converter writes."""


def rope_parameters(own: Mapping[str, Any], factors: Mapping[str, list[float]], path: Path) -> dict[str, Any]:
    """transformers' rope_parameters of a file.

    Args:
        own: the result of gguf_fields.own_fields.
        factors: "long" and "short", or "freqs" -> factors of frequencies; none where the file has no such tensors.
        path: the file, for messages.

    Raises:
        ModelRefused: a kind besides none, linear, yarn and longrope, or an impossible value.
    """
    out: dict[str, Any] = {"rope_theta": own.get("rope.freq_base"), **_scaling(own, factors, path)}
    if "freqs" in factors:
        out["freqs_factor"] = factors["freqs"]
    width, head = own.get("rope.dimension_count"), own.get("attention.key_length")
    latent = "attention.kv_lora_rank" in own
    if width is not None and not latent:
        if type(width) is not int or type(head) is not int or not 0 < width <= head:
            raise _refused("a rope.dimension_count of at most attention.key_length", width, path)
        if width < head:
            out["partial_rotary_factor"] = width / head
    return out


def _scaling(own: Mapping[str, Any], factors: Mapping[str, list[float]], path: Path) -> dict[str, Any]:
    kind, factor = own.get("rope.scaling.type", "linear"), _factor(own)
    if factors.keys() >= {"long", "short"}:
        return _longrope(own, factors, path)
    if kind not in ("none", "linear", "yarn"):
        raise _refused("rotary embeddings of kind none, linear or yarn", kind, path)
    if not (type(factor) is float and 0 < factor < 1e6):
        raise _refused("a number above 0 for rope.scaling.factor", factor, path)
    if kind == "none" or factor == 1:
        return {"rope_type": "default"}
    return {"rope_type": "linear", "factor": factor} if kind == "linear" else _yarn(own, factor, path)


def _yarn(own: Mapping[str, Any], factor: float, path: Path) -> dict[str, Any]:
    whole = own.get("rope.scaling.yarn_ext_factor", 1.0)
    if whole != 1:
        raise _refused("rope.scaling.yarn_ext_factor 1", whole, path)
    original = own.get("rope.scaling.original_context_length", own.get("context_length"))
    strength = own.get("rope.scaling.yarn_attn_factor", own.get("rope.scaling.attn_factor", 1.0))
    multiplier = own.get("rope.scaling.yarn_log_multiplier")
    betas = {
        key: own[f"rope.scaling.{field}"] for field, key in _BETAS.items() if f"rope.scaling.{field}" in own
    }
    numbers = (original, strength, *betas.values(), *(() if multiplier is None else (multiplier,)))
    for value in numbers:
        if type(value) not in (int, float) or not 0 < value < 1e9:
            raise _refused("numbers above 0 for yarn's fields of rope.scaling", value, path)
    out = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        **betas,
    }
    if multiplier is None or "attention.kv_lora_rank" not in own:
        return out | {"attention_factor": strength * (1 + 0.1 * math.log(factor))}
    # Models with latents have the factor on products of queries and keys, not on the embedding.
    scale = multiplier / _LATENT_MULTIPLIER
    return out | {"mscale": scale, "mscale_all_dim": scale}


def _longrope(own: Mapping[str, Any], factors: Mapping[str, list[float]], path: Path) -> dict[str, Any]:
    original, strength = (
        own.get("rope.scaling.original_context_length"),
        own.get("rope.scaling.attn_factor", 1.0),
    )
    if type(original) is not int or original < 1 or type(strength) is not float or not 0 < strength < 1e3:
        raise _refused(
            "original_context_length and attn_factor above 0 in rope.scaling", (original, strength), path
        )
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original,
        **dict.fromkeys(("short_mscale", "long_mscale"), strength),
        **{f"{name}_factor": values for name, values in factors.items()},
    }


def _factor(own: Mapping[str, Any]) -> Any:
    """The factor by which positions are divided; 0 stands for 1. Old files have it as rope.scale_linear."""
    value = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    return 1.0 if type(value) in (int, float) and value == 0 else value


def _refused(expectation: str, finding: object, path: Path) -> ModelRefused:
    action = "use the model's checkpoint as safetensors"
    return ModelRefused(f"{expectation} in {path}", shortened(finding), action)
