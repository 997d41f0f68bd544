"""Sizes and rotary embeddings of a GGUF file, with the values that llama.cpp has where the file has none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from edgemoe.errors import ModelRefused
from edgemoe.storage.files.untrusted import shortened

_BETAS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
"""Field after rope.scaling -> key of transformers' rotary parameters."""


def own_fields(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of an architecture without its name in front, and values that follow from others.

    Args:
        fields: all of a file.
        name: the architecture's name, which is the prefix of its fields.
    """
    own = {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")}
    heads, hidden = own.get("attention.head_count"), own.get("embedding_length")
    own.setdefault("rope.freq_base", 10000.0)
    if _is_size(heads):
        own.setdefault("attention.head_count_kv", heads)
        if _is_size(hidden):
            own.setdefault("attention.key_length", hidden // heads)
    inner, used = own.get("feed_forward_length"), own.get("expert_used_count")
    if _is_size(inner) and _is_size(used):
        own.setdefault("expert_feed_forward_length", inner // used)
    return own


def rope_scaling(own: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    """The rope_scaling of a config.json; None without scaling.

    Args:
        own: from own_fields.
        path: the file, for messages.

    Raises:
        ModelRefused: a kind besides none, linear and yarn, or an impossible value.
    """
    kind, factor = own.get("rope.scaling.type", "linear"), _factor(own)
    if kind not in ("none", "linear", "yarn"):
        raise _refused("rotary embeddings of kind none, linear or yarn", kind, path)
    if not (type(factor) is float and 0 < factor < 1e6):
        raise _refused("a number above 0 for rope.scaling.factor", factor, path)
    if kind == "none" or factor == 1:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    whole = own.get("rope.scaling.yarn_ext_factor", 1.0)
    if whole != 1:
        raise _refused("rope.scaling.yarn_ext_factor 1", whole, path)
    original = own.get("rope.scaling.original_context_length", own.get("context_length"))
    strength = own.get("rope.scaling.yarn_attn_factor", own.get("rope.scaling.attn_factor", 1.0))
    betas = {
        key: own[f"rope.scaling.{field}"] for field, key in _BETAS.items() if f"rope.scaling.{field}" in own
    }
    for value in (original, strength, *betas.values()):
        if type(value) not in (int, float) or not 0 < value < 1e9:
            raise _refused("numbers above 0 for yarn's fields of rope.scaling", value, path)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": strength * (1 + 0.1 * math.log(factor)),
        **betas,
    }


def _factor(own: Mapping[str, Any]) -> Any:
    """The factor by which positions are divided; 0 stands for 1. Old files have it as rope.scale_linear."""
    value = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    return 1.0 if type(value) in (int, float) and value == 0 else value


def _is_size(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _refused(wanted: str, found: object, path: Path) -> ModelRefused:
    action = "use the model's checkpoint as safetensors"
    return ModelRefused(f"{wanted} in {path}", shortened(found), action)
