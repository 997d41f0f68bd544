"""Fields and tensors, by name and form, that llama.cpp's converter writes of a model of transformers.

An inverse of what edgemoe reads, written from the converter's conventions alone: names come from the gguf package's map
of the model's own names, as the converter takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gguf
import torch

SOFTMAX, SIGMOID = 1, 2

Tensors = Iterator[tuple[str, torch.Tensor]]
Modify = Callable[[str, torch.Tensor, Any], Tensors]
"""(name in transformers, tensor, config) -> names and tensors that the map of names knows."""

NAMES = {
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "qwen2_moe": "qwen2moe",
    "minimax_m2": "minimax-m2",
    "lfm2_moe": "lfm2moe",
    "dots1": "dots1",
    "hunyuan_v1_moe": "hunyuan-moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "phimoe": "phimoe",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h_moe",
    "gemma4_text": "gemma4",
}
"""model_type -> general.architecture."""


def fields_of(config: Any) -> dict[str, Any]:
    """Fields without the architecture's name in front, as the converter's classes add them."""
    kind, values = config.model_type, config.to_dict()

    def has(*names: str) -> Any:
        return next((value for name in names if (value := values.get(name)) is not None), None)

    rope = getattr(config, "rope_parameters", None) or {}
    head = has("head_dim") or config.hidden_size // config.num_attention_heads
    out = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": has("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": has("rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": has("layer_norm_epsilon"),
        "context_length": config.max_position_embeddings,
        "rope.freq_base": float(rope["rope_theta"]) if "rope_theta" in rope else None,
        "expert_used_count": has("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
        "expert_count": has("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "feed_forward_length": has("intermediate_size"),
        "expert_group_count": has("n_group"),
        "expert_group_used_count": has("topk_group"),
        "expert_feed_forward_length": has("moe_intermediate_size"),
        "expert_shared_feed_forward_length": has("shared_expert_intermediate_size"),
        "attention.key_length": head,
        "attention.value_length": head,
    }
    if rope.get("rope_type") == "yarn":
        out |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    out |= _FIELDS[kind](config, head, rope) if kind in _FIELDS else {}
    return {key: value for key, value in out.items() if value is not None}


def _qwen3_next(config: Any, head: int, rope: Any) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_value_head_dim * config.linear_num_value_heads,
        "full_attention_interval": config.layer_types.index("full_attention") + 1,
        "rope.dimension_count": int(head * rope["partial_rotary_factor"]),
    }


def _qwen3_5(config: Any, head: int, rope: Any) -> dict[str, Any]:
    return _qwen3_next(config, head, rope) | {"rope.dimension_sections": [1, 1, 0, 0]}


def _grouped(config: Any, head: int, rope: Any) -> dict[str, Any]:
    return {
        "expert_shared_count": config.n_shared_experts,
        "leading_dense_block_count": config.first_k_dense_replace,
        "expert_gating_func": SIGMOID,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
    }


def _glm4(config: Any, head: int, rope: Any) -> dict[str, Any]:
    own = {"rope.dimension_count": int(head * rope["partial_rotary_factor"])}
    return _grouped(config, head, rope) | own | {"nextn_predict_layers": config.num_nextn_predict_layers}


def _latent(config: Any, head: int, rope: Any) -> dict[str, Any]:
    is_v2 = config.model_type == "deepseek_v2"
    dense = getattr(config, "first_k_dense_replace", None)
    multiplier = rope.get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1,
        "leading_dense_block_count": config.mlp_layer_types.count("dense") if dense is None else dense,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.kv_lora_rank": config.kv_lora_rank,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "attention.value_length_mla": config.v_head_dim,
        "expert_shared_count": config.n_shared_experts,
        "expert_gating_func": SOFTMAX if is_v2 else SIGMOID,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": True if config.norm_topk_prob and not is_v2 else None,
        "rope.dimension_count": config.qk_rope_head_dim,
        "rope.scaling.yarn_log_multiplier": None if multiplier is None else 0.1 * multiplier,
    }


_MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "attention.scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _granite(config: Any, head: int, rope: Any) -> dict[str, Any]:
    own = {field: float(getattr(config, key)) for field, key in _MULTIPLIERS.items()}
    return own | {"expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", None)}


def _phimoe(config: Any, head: int, rope: Any) -> dict[str, Any]:
    out: dict[str, Any] = {"attention.sliding_window": config.sliding_window, "rope.dimension_count": head}
    if rope["rope_type"] == "longrope":
        out |= {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.attn_factor": rope["long_mscale"],
        }
    return out


def _granite_hybrid(config: Any, head: int, rope: Any) -> dict[str, Any]:
    return _granite(config, head, rope) | {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.state_size": config.mamba_d_state,
        "ssm.group_count": config.mamba_n_groups,
        "ssm.inner_size": config.mamba_n_heads * config.mamba_d_head,
        "ssm.time_step_rank": config.mamba_n_heads,
        "attention.head_count_kv": [
            config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types
        ],
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
    }


def _nemotron(config: Any, head: int, rope: Any) -> dict[str, Any]:
    kinds = config.layers_block_type
    return {
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.state_size": config.ssm_state_size,
        "ssm.group_count": config.n_groups,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.time_step_rank": config.mamba_num_heads,
        "attention.head_count_kv": [
            config.num_key_value_heads * (kind == "full_attention") for kind in kinds
        ],
        "feed_forward_length": [config.moe_intermediate_size * (kind == "moe") for kind in kinds],
        "expert_shared_feed_forward_length": config.moe_shared_expert_intermediate_size,
        "expert_shared_count": config.n_shared_experts,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
    }


def _gemma4(config: Any, head: int, rope: Any) -> dict[str, Any]:
    windows = [kind == "sliding_attention" for kind in config.layer_types]
    values = config.to_dict()
    whole = config.per_layer_config[windows.index(False)]
    return {
        "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": [
            values["num_key_value_heads"] if window else whole.num_key_value_heads for window in windows
        ],
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": windows,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.key_length": whole.head_dim,
        "attention.value_length": whole.head_dim,
        "attention.key_length_swa": values["head_dim"],
        "attention.value_length_swa": values["head_dim"],
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input,
        "rope.dimension_count": whole.head_dim,
        "rope.dimension_count_swa": values["head_dim"],
        "final_logit_softcapping": config.final_logit_softcapping,
    }


_FIELDS: dict[str, Callable[[Any, int, Any], dict[str, Any]]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5_moe_text": _qwen3_5,
    "gpt_oss": lambda config, head, rope: {
        "attention.sliding_window": config.sliding_window,
        "expert_feed_forward_length": config.intermediate_size,
    },
    "glm4_moe": _glm4,
    "dots1": _grouped,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _latent),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _granite),
    "minimax_m2": lambda config, head, rope: {
        "expert_feed_forward_length": config.intermediate_size,
        "expert_gating_func": SIGMOID,
        "rope.dimension_count": int(head * rope.get("partial_rotary_factor", 1)),
    },
    "lfm2_moe": lambda config, head, rope: {
        "attention.head_count_kv": [
            config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types
        ],
        "leading_dense_block_count": config.num_dense_layers,
        "expert_gating_func": SIGMOID,
        "shortconv.l_cache": config.conv_L_cache,
    },
    "hunyuan_v1_moe": lambda config, head, rope: {
        "expert_feed_forward_length": config.intermediate_size,
        "expert_shared_feed_forward_length": config.intermediate_size,
        "expert_shared_count": 1,
    },
    "ernie4_5_moe": lambda config, head, rope: {
        "interleave_moe_layer_step": config.moe_layer_interval,
        "leading_dense_block_count": config.moe_layer_start_index,
        "expert_shared_count": config.moe_num_shared_experts,
        "expert_shared_feed_forward_length": config.moe_num_shared_experts * config.moe_intermediate_size,
    },
    "phimoe": _phimoe,
    "granitemoehybrid": _granite_hybrid,
    "nemotron_h": _nemotron,
    "gemma4_text": _gemma4,
}
"""model_type -> fields that its own class adds."""


def tensors_of(model: Any) -> Tensors:
    """Every tensor of a file by its name there, float32."""
    config = model.config
    architecture = NAMES[config.model_type]
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[architecture], config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        for new, made in modified(_as_published(name), tensor.float(), config):
            found = names.get_name(new, try_suffixes=(".weight", ".bias", ".scale"))
            assert found is not None, (architecture, new)
            yield found, made if made.ndim > 2 or "ssm_" in found else torch.atleast_1d(made.squeeze())
    if config.model_type == "gemma4_text":
        part = config.rope_parameters["full_attention"]["partial_rotary_factor"]
        half = config.per_layer_config[config.layer_types.index("full_attention")].head_dim // 2
        turning = int(2 * half * part / 2)
        yield "rope_freqs.weight", torch.tensor([1.0] * turning + [1e30] * (half - turning))
    if "long_factor" in (rope := getattr(config, "rope_parameters", None) or {}):
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", torch.tensor(rope[f"{kind}_factor"])


def _as_published(name: str) -> str:
    """A name in modules as checkpoints have it, where the map of names knows only that one."""
    for modules, published in (
        ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"),
        ("mlp.gate.moe_statics.", "mlp.moe_statics."),
        ("feed_forward.expert_bias", "feed_forward.expert_bias.bias"),
        ("layer_scalar", "layer_scalar.weight"),
    ):
        name = name.replace(modules, published)
    return name.replace("e_score_correction_bias", "e_score_correction.bias")


def modified(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """A tensor as the converter's class of the model changes it before it looks up the name."""
    base, _, leaf = name.rpartition(".")
    if leaf in ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        if config.model_type == "gemma4_text" and leaf == "gate_up_proj":
            yield f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight", tensor
        else:
            yield from _experts(base, leaf, tensor, turned=config.model_type == "gpt_oss")
    elif config.model_type in ("qwen3_next", "qwen3_5_moe_text"):
        yield from _delta_net(name, tensor, config)
    elif name.endswith("kv_b_proj.weight"):
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        both = tensor.view(heads, config.qk_nope_head_dim + config.v_head_dim, rank)
        keys, values = both.split((config.qk_nope_head_dim, config.v_head_dim), 1)
        yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
        yield name.replace("kv_b", "v_b"), values
    elif name.endswith("shared_mlp.input_linear.weight"):
        layer = name.split(".")[2]
        for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"blk.{layer}.ffn_{part}_shexp.weight", rows
    elif ".mamba." in name or ".mixer." in name:
        yield _as_in_backbone(name, config), _mamba(name, tensor, config)
    elif base.endswith(".router") and leaf in ("scale", "per_expert_scale"):
        part = "ffn_gate_inp" if leaf == "scale" else "ffn_down_exps"
        yield f"blk.{name.split('.')[2]}.{part}.scale", tensor
    elif leaf == "sinks":
        yield f"{name}.weight", tensor
    elif NAMES[config.model_type] in PAIRED and base.endswith(("q_proj", "k_proj")):
        own = config.num_attention_heads if base.endswith("q_proj") else config.num_key_value_heads
        yield name, paired(tensor, own)
    elif ".conv.conv" in name:
        yield name, tensor.squeeze(1)
    else:
        yield name, tensor


def _as_in_backbone(name: str, config: Any) -> str:
    """The name of a state-space layer's tensor, or of another layer's of Nemotron, as the map of names knows it."""
    name = name.replace("mamba.dt_bias", "mamba.dt_proj.bias").replace("mixer.dt_bias", "mixer.dt.bias")
    return name.replace("model.", "backbone.", 1) if config.model_type == "nemotron_h" else name


def _mamba(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    leaf = name.rpartition(".")[2]
    if leaf == "A_log":
        return -torch.exp(tensor).view(-1, 1)
    if leaf == "D":
        return tensor.view(-1, 1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = config.n_groups if config.model_type == "nemotron_h" else config.mamba_n_groups
        return tensor.view(groups, -1)
    return tensor.squeeze(1) if name.endswith("conv1d.weight") else tensor


PAIRED = ("llama", "granitemoe", "granitehybrid")
"""Architectures whose rotary embedding turns neighbouring rows."""


def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of llama.cpp's rotary embedding: rows i and i + half of a head interleaved."""
    half = weight.shape[0] // heads // 2
    order = [
        h * 2 * half + pair + side * half for h in range(heads) for pair in range(half) for side in (0, 1)
    ]
    return weight[order]


def _experts(base: str, leaf: str, tensor: torch.Tensor, *, turned: bool) -> Tensors:
    """Tensors over all experts, gate and up apart; gpt-oss has their columns in turn, and matrices turned."""
    layer, suffix = base.split(".")[2], "bias" if leaf.endswith("_bias") else "weight"
    if turned and suffix == "weight":
        tensor = tensor.transpose(1, 2)
    parts = {leaf.split("_")[0]: tensor}
    if leaf.startswith("gate_up"):
        gate, up = (tensor[:, ::2], tensor[:, 1::2]) if turned else tensor.chunk(2, 1)
        parts = {"gate": gate, "up": up}
    for part, each in parts.items():
        yield f"blk.{layer}.ffn_{part}_exps.{suffix}", each.contiguous()


def _delta_net(name: str, tensor: torch.Tensor, config: Any) -> Tensors:
    """Qwen3-Next's tensors, and Qwen3.5's, whose value heads are in another order too."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    width, each = config.linear_key_head_dim * keys, config.linear_value_head_dim
    if config.model_type == "qwen3_5_moe_text" and "linear_attn." in name:

        def tiled(rows: torch.Tensor, size: int) -> torch.Tensor:
            heads = [rows[i * size : (i + 1) * size] for i in range(values)]
            per_key = values // keys
            return torch.cat([heads[k * per_key + v] for v in range(per_key) for k in range(keys)])

        if "in_proj_qkv." in name or "conv1d" in name:
            tensor = torch.cat((tensor[: 2 * width], tiled(tensor[2 * width :], each)))
        elif "in_proj_z." in name:
            tensor = tiled(tensor, each)
        elif "out_proj." in name:
            tensor = tiled(tensor.t(), each).t()
        elif "linear_attn.norm" not in name:
            tensor = tiled(tensor, 1)
    if name.endswith(".A_log"):
        yield name, -torch.exp(tensor)
    elif name.endswith(".dt_bias"):
        yield name.replace(".dt_bias", ".dt_proj.bias"), tensor
    elif "conv1d" in name:
        yield name, tensor.squeeze(1)
    elif name.endswith("norm.weight") and "linear_attn" not in name:
        yield name, tensor + 1
    elif "in_proj_qkvz" in name:
        own = values // keys * each
        parts = tensor.view(keys, -1, tensor.shape[1]).split((width // keys, width // keys, own, own), 1)
        queries, key_rows, value_rows, gates = (part.flatten(0, 1) for part in parts)
        layer = name.split(".")[2]
        yield f"blk.{layer}.attn_qkv.weight", torch.cat((queries, key_rows, value_rows))
        yield f"blk.{layer}.attn_gate.weight", gates
    else:
        yield name, tensor
