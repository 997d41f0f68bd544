"""Models whose embeddings, attention, residuals and logits have multipliers, as models of a family without them.

    x = e * E[token];    x += r * block(norm(x));    logits = head(norm(x)) / l;    scores = a * q . k

With y = x / r the same model is y = (e / r) * E[token], y += block(norm(y)), where the norm's epsilon is r^2 times
smaller. So e / r goes into the embedding, 1 / l into the head, and a * sqrt(head size), which other families' attention
lacks, into the queries. Experts, routers and all other weights keep their bits; the three are rounded to bf16 again.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

from edgemoe.errors import ModelRefused
from edgemoe.storage.convert.config import Config
from edgemoe.storage.export.dense import EMBEDDING, HEAD, DenseTensors
from edgemoe.storage.export.names import ExportNames
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, shortened

_KEYS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

_ASSUMED: Config = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
"""transformers' values of granitemoe's keys where config.json has none; other families have other values."""

_FORMS = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "sliding_window": None},
}
"""model_type without multipliers -> the config values that it needs besides."""


def without_multipliers(
    file: Path, family: ExportNames, other: ExportNames, config: Config
) -> tuple[DenseTensors, ExportNames, Mapping[str, Any]]:
    """Makes the dense weights, names and config of a model in the form of a family without multipliers.

    Args:
        file: the store's file of dense weights.
        family: the family of the model.
        other: the family without multipliers, one of _FORMS.
        config: the config of the model.

    Raises:
        ModelRefused: a multiplier is not above 0, or attention has biases, which the form lacks.
    """
    embedding, attention, residual, logits = (_multiplier(config, key) for key in _KEYS)
    if config.get("attention_bias"):
        raise ModelRefused(
            "attention without biases for compressed-tensors", "attention_bias", "export as safetensors"
        )
    heads = config["num_attention_heads"]
    queries = attention * sqrt(config.get("head_dim") or config["hidden_size"] // heads)
    layers = range(config["num_hidden_layers"])
    factors = {f"model.layers.{layer}.self_attn.q_proj.weight": queries for layer in layers}
    factors |= {EMBEDDING: embedding / residual, HEAD: 1 / logits}
    routers = {family.router(layer): other.router(layer) for layer in family.moe_layers}

    def rename(name: str) -> str:
        name = family.in_checkpoint(name)
        return routers.get(name, name)

    dense = DenseTensors(file, rename, own_head=True, factors=factors)
    made = {**_ASSUMED, **{key: value for key, value in config.items() if key not in _KEYS}}
    if "rope_theta" in config and "rope_parameters" not in config:
        made.pop("rope_parameters")
    made |= _FORMS[other.model_type] | {"model_type": other.model_type}
    made["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    made["rms_norm_eps"] = float(made["rms_norm_eps"]) / residual**2
    return dense, other, made


def _multiplier(config: Config, key: str) -> float:
    value = config.get(key, 1.0)
    if type(value) not in (int, float) or not 0 < value < 1e12:
        raise ModelRefused(f"a number above 0 for {key} in config.json", shortened(value), CHECK_ORIGIN)
    return float(value)
