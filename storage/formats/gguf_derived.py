"""Config values that follow from several fields of a GGUF file, or from the tensors that it has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from edgemoe.errors import ModelRefused
from edgemoe.storage.files.untrusted import shortened

Own = Mapping[str, Any]
"""The fields of an architecture, without its name in front; and the tokenizer's, as the file has them."""

Derive = Callable[[Own, Collection[str], Mapping[str, Any]], dict[str, Any]]
"""(fields, names of all tensors, config so far) -> further config values, which count."""

_ACTION = "use the model's checkpoint as safetensors"
_GLM = ("glm4", "chatglm-bpe")
"""Rules that split text of GLM-4.7-Flash, which llama.cpp's converter writes as a DeepSeek model."""


def derives(key: str, *parts: str) -> Derive:
    """Sets a config key to whether the file has a tensor, in any layer, or outside of layers.

    Args:
        key: the key in transformers' config.
        parts: ends of the tensors' names.
    """

    def derive(own: Own, names: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
        return {key: any(name == part or name.endswith(f".{part}") for name in names for part in parts)}

    return derive


def granite_with_shared_experts(
    own: Own, names: Collection[str], config: Mapping[str, Any]
) -> dict[str, Any]:
    """The config of a Granite model whose layers have an expert for all tokens; an empty one without."""
    inner = own.get("expert_shared_feed_forward_length", 0)
    if not inner:
        return {}
    return {
        "model_type": "granitemoeshared",
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "shared_intermediate_size": inner,
    }


def shared_expert_size(own: Own, names: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """The inner size of the expert for all tokens; old files have one field for it and for dense layers."""
    field = "expert_shared_feed_forward_length"
    return {"shared_expert_intermediate_size": own.get(field, own.get("feed_forward_length"))}


def linear_layers(own: Own, names: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of each layer, and the size of a value head, of models with gated delta nets."""
    heads, width = _size(own, "ssm.time_step_rank"), _size(own, "ssm.inner_size")
    interval = own.get("full_attention_interval", 4)
    if width % heads or type(interval) is not int or interval < 1:
        raise ModelRefused(
            "ssm.inner_size of whole value heads, and a full_attention_interval of at least 1",
            f"{width} of {heads} heads, and {shortened(interval)}",
            _ACTION,
        )
    kinds = ["linear_attention", "full_attention"]
    layers = _size(config, "num_hidden_layers")
    return {
        "linear_value_head_dim": width // heads,
        "layer_types": [kinds[(layer + 1) % interval == 0] for layer in range(layers)],
    }


def convolution_layers(own: Own, names: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of each layer of models with short convolutions, which have no heads of keys there."""
    return {"layer_types": ["full_attention" if count else "conv" for count in _by_layer(own, config)]}


def mamba_sizes(own: Own, names: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of each layer of Granite's hybrids, and sizes of their state-space layers.

    Layers without heads of keys are of state-space kind; positions count where the file says `finetuned`.
    """
    heads, width, hidden = (
        _size(own, "ssm.time_step_rank"),
        _size(own, "ssm.inner_size"),
        _size(config, "hidden_size"),
    )
    kinds = ["full_attention" if count else "linear_attention" for count in _by_layer(own, config)]
    return {
        "mamba_d_head": width // heads,
        "mamba_expand": width // hidden,
        "layer_types": kinds,
        "position_embedding_type": "rope" if own.get("rope.scaling.finetuned") else None,
    }


def nemotron_layers(own: Own, names: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of each layer of Nemotron 3, which is attention, experts or state-space alone, and a head's size."""
    heads, width = _size(own, "ssm.time_step_rank"), _size(own, "ssm.inner_size")
    inner = _by_layer(own, config, "feed_forward_length")
    pairs = zip(_by_layer(own, config), inner, strict=True)
    kinds = ["full_attention" if keys else "moe" if size else "linear_attention" for keys, size in pairs]
    return {"mamba_head_dim": width // heads, "layers_block_type": kinds}


def gemma4_layers(own: Own, names: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of each layer of Gemma 4, sizes of heads by kind, and rotary parameters by kind.

    The factors of frequencies are 1 for frequencies that turn, and huge for others.
    """
    windows = own.get("attention.sliding_window_pattern")
    layers = _size(config, "num_hidden_layers")
    if not isinstance(windows, list) or len(windows) < layers:
        raise ModelRefused("attention.sliding_window_pattern of each layer", shortened(windows), _ACTION)
    whole = [not window for window in windows[:layers]]
    heads = _by_layer(own, config)
    joint = not all(f"blk.{layer}.attn_v.weight" in names for layer in range(layers))
    rope = config["rope_parameters"]
    factors = rope.pop("freqs_factor", [1.0])
    turning = sum(factor == 1 for factor in factors) / len(factors)
    out = {
        "layer_types": ["full_attention" if all_of else "sliding_attention" for all_of in whole],
        "head_dim": own.get("attention.key_length_swa"),
        "global_head_dim": own.get("attention.key_length"),
        "num_key_value_heads": next((n for n, all_of in zip(heads, whole, strict=True) if not all_of), None),
        "attention_k_eq_v": joint,
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": own.get("rope.freq_base_swa", 10000.0),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": rope["rope_theta"],
                "partial_rotary_factor": turning,
            },
        },
    }
    if joint:
        out["num_global_key_value_heads"] = next((n for n, a in zip(heads, whole, strict=True) if a), None)
    return out


def _by_layer(own: Own, config: Mapping[str, Any], field: str = "attention.head_count_kv") -> list[int]:
    """A field with a number for each layer, which may be one number for all.

    Raises:
        ModelRefused: another value.
    """
    value, layers = own.get(field), _size(config, "num_hidden_layers")
    values = [value] * layers if type(value) is int else value
    if not isinstance(values, list) or len(values) < layers or not all(type(n) is int for n in values):
        raise ModelRefused(f"{field} of each layer", shortened(value), _ACTION)
    return values[:layers]


def untruncated_yarn(own: Own, names: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """gpt-oss's YaRN, whose bounds between frequencies are no whole numbers."""
    rope = config["rope_parameters"]
    return {"rope_parameters": rope | {"truncate": False}} if rope["rope_type"] == "yarn" else {}


def latent_sizes(own: Own, names: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of heads that are expanded from latents.

    llama.cpp counts one head of latents; files of before April 2025 have the expanded heads themselves.
    """
    heads, rotary = _size(config, "num_attention_heads"), _size(own, "rope.dimension_count")
    whole = own.get("attention.key_length_mla", own.get("attention.key_length"))
    values = own.get("attention.value_length_mla", own.get("attention.value_length"))
    if type(whole) is not int or type(values) is not int or whole <= rotary:
        raise ModelRefused(
            "attention.key_length_mla of more than the rotary part, and attention.value_length_mla",
            f"{shortened(whole)} and {shortened(values)}",
            _ACTION,
        )
    rank = own.get("attention.q_lora_rank")
    return {
        "num_key_value_heads": heads,
        "qk_nope_head_dim": whole - rotary,
        "v_head_dim": values,
        "head_dim": rotary,
        "q_lora_rank": rank,
    }


def kind_of_deepseek(own: Own, names: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """Tells DeepSeek-V3 and what has its router, GLM-4.7-Flash, and DeepSeek-V2 from each other."""
    dense = own.get("leading_dense_block_count", 0)
    corrected = any(name.endswith(".exp_probs_b.bias") for name in names)
    gating = own.get("expert_gating_func", 2 if corrected else 1)
    if gating == 2 and own.get("tokenizer.ggml.pre") in _GLM:
        layers = _size(config, "num_hidden_layers")
        kinds = ["dense" if layer < dense else "sparse" for layer in range(layers)]
        own_names = {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"]}
        return own_names | {"mlp_layer_types": kinds}
    if gating == 2:
        return {"first_k_dense_replace": dense}
    if gating != 1 or config.get("norm_topk_prob"):
        raise ModelRefused(
            "a router of DeepSeek-V2 or V3, softmax without a sum of 1, or sigmoid",
            f"expert_gating_func {shortened(gating)} and expert_weights_norm {config.get('norm_topk_prob')}",
            _ACTION,
        )
    groups = config.get("n_group", 1) != 1
    return {
        "model_type": "deepseek_v2",
        "architectures": ["DeepseekV2ForCausalLM"],
        "first_k_dense_replace": dense,
        "topk_method": "group_limited_greedy" if groups else "greedy",
    }


def own_window(own: Own, names: Collection[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """The window of all layers; files have 0 for none."""
    return {"sliding_window": own.get("attention.sliding_window") or None}


def _size(values: Mapping[str, Any], key: str) -> int:
    """A whole number above 0 of at most 2^20.

    Raises:
        ModelRefused: another value.
    """
    value = values.get(key)
    if type(value) is not int or not 0 < value <= 1 << 20:
        raise ModelRefused(f"a whole number from 1 to {1 << 20} for {key}", shortened(value), _ACTION)
    return value
