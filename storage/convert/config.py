"""A model's config.json: the bounds of its sizes, and a multimodal model's config of its language model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgemoe.errors import ModelRefused
from edgemoe.storage.files.untrusted import CHECK_ORIGIN, shortened

Config = Mapping[str, Any]
"""A model's config.json after bounded_config."""

EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K_KEYS = ("num_experts_per_tok", "moe_k", "moe_topk")

BY_LAYER = ("moe_topk", "moe_intermediate_size")
"""Keys whose value may be a list, with a number for each layer."""

_KINDS = ("layers_block_type", "hybrid_override_pattern")
"""Keys with the kind of each layer, as a list or as a letter each, whose length is the number of layers."""

WRAPPED_IN = "wrapped_in"
"""Key of a bounded config: the model_type of the multimodal model whose language model it is of."""

REQUIRED_BOUNDS = {
    "num_hidden_layers": 1024,
    "hidden_size": 131_072,
    "num_attention_heads": 4096,
    "vocab_size": 10_000_000,
}
OPTIONAL_BOUNDS = {
    **dict.fromkeys(EXPERT_COUNT_KEYS, 4096),
    **dict.fromkeys(TOP_K_KEYS, 4096),
    "num_key_value_heads": 4096,
    "head_dim": 131_072,
    "intermediate_size": 1_048_576,
    "moe_intermediate_size": 131_072,
    "max_position_embeddings": 1 << 30,
    "decoder_sparse_step": 1024,
    "sliding_window": 1 << 30,
    "full_attention_interval": 1024,
    "num_nextn_predict_layers": 1024,
}
"""Config key -> largest value accepted; the smallest is 1. Several times the values of all known models."""

ZERO_ALLOWED = ("sliding_window", "num_nextn_predict_layers")
"""Keys of OPTIONAL_BOUNDS whose smallest value is 0, which some published configs have."""


def bounded_config(config: object) -> dict[str, Any]:
    """Returns a copy of the config after a check that every size in it is within bounds.

    Of a multimodal model it is the config of the language model (text_config). The copy has no `auto_map`, the
    checkpoint's own code: transformers' code runs the model types that it supports, and other types are refused.

    Args:
        config: config.json as parsed.

    Raises:
        ModelRefused: with the key and the value.
    """
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelRefused(
            "a config.json with a model_type", shortened(config), "use a checkpoint made for transformers"
        )
    config = language_model({key: value for key, value in config.items() if key != WRAPPED_IN})
    kinds = next((config[key] for key in _KINDS if isinstance(config.get(key), list | str)), None)
    if kinds:
        config = config | {"num_hidden_layers": len(kinds)}
    for key, bound in (REQUIRED_BOUNDS | OPTIONAL_BOUNDS).items():
        value = config.get(key)
        if value is None and key in OPTIONAL_BOUNDS:
            continue
        least = int(key not in ZERO_ALLOWED)
        values = value if key in BY_LAYER and type(value) is list and value else [value]
        if not all(type(each) is int and least <= each <= bound for each in values):
            raise ModelRefused(
                f"a whole number from {least} to {bound} for {key} in config.json",
                shortened(value),
                CHECK_ORIGIN,
            )
    top_k_key = next((key for key in TOP_K_KEYS if config.get(key)), TOP_K_KEYS[0])
    top_k = _largest(config.get(top_k_key) or 1)
    for key in EXPERT_COUNT_KEYS:
        if top_k > _largest(config.get(key) or top_k):
            raise ModelRefused(
                f"{top_k_key} of at most {key} = {config[key]} in config.json", str(top_k), CHECK_ORIGIN
            )
    return {key: value for key, value in config.items() if key != "auto_map"}


def _largest(value: int | list[int]) -> int:
    return max(value) if isinstance(value, list) else value


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a multimodal model's language model, with the other keys of the whole; other configs unchanged.

    A key that both have counts as the language model has it, but for tied embeddings, which the whole model decides.

    Raises:
        ModelRefused: the language model has no model_type.
    """
    text = config.get("text_config")
    if not isinstance(text, dict) or "num_hidden_layers" in config:
        return config
    if not isinstance(text.get("model_type"), str):
        raise ModelRefused(
            "a text_config with a model_type in config.json", shortened(text.get("model_type")), CHECK_ORIGIN
        )
    outer = {k: v for k, v in config.items() if k != "text_config" and not k.startswith("vision_")}
    tied = {key: outer[key] for key in ("tie_word_embeddings",) if key in outer}
    return outer | text | tied | {WRAPPED_IN: config["model_type"]}
