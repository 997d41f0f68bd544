"""A small random model of every family, as transformers builds and saves it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from small_tokenizer import a_tokenizer
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from edgemoe.families.meta_model import WithHead

VOCABULARY = 300
CONTEXT = 64

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
}
FEW = {"moe_intermediate_size": 32, "intermediate_size": 96}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V3 = LATENT | FEW | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
KIMI_DELTA = (
    LATENT
    | FEW
    | {
        **{"qk_rope_head_dim": 16, "num_experts": 8, "linear_head_dim": 16, "linear_num_heads": 4},
        **{"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        **{"mlp_layer_types": ["dense", "sparse", "sparse"]},
    }
)

SMALL: dict[str, dict[str, Any]] = {
    "qwen2_moe": FEW
    | {
        "num_experts": 8,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 2,
    },
    "qwen3_moe": FEW | {"num_experts": 8, "head_dim": 16, "norm_topk_prob": True},
    "qwen3_next": FEW
    | {
        "num_experts": 8,
        "shared_expert_intermediate_size": 48,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "mixtral": {"num_local_experts": 8, "intermediate_size": 32, "sliding_window": 5},
    "olmoe": {"num_experts": 8, "intermediate_size": 32, "clip_qkv": 1.5},
    "deepseek_v2": LATENT
    | FEW
    | {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 4.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    },
    "deepseek_v3": DEEPSEEK_V3,
    "glm4_moe": FEW
    | {
        "head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "intermediate_size": 32,
        "sliding_window": 4,
    },
    "phimoe": {
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "intermediate_size": 32,
        "sliding_window": 5,
        "attention_bias": True,
        "lm_head_bias": True,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [1.5] * 8,
            "short_mscale": 1.1,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 128,
        },
    },
    "granitemoe": {
        "num_local_experts": 8,
        "intermediate_size": 32,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "ernie4_5_moe": FEW
    | {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
}
"""model_type -> config in addition to COMMON, with the family's particular parts switched on."""

OF_A_FOLDER: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": SMALL["qwen3_next"],
    "minimax_m2": {
        "num_local_experts": 8,
        "intermediate_size": 32,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "hy_v3": FEW
    | {
        "num_experts": 8,
        "num_shared_experts": 1,
        "head_dim": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "dots1": FEW
    | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "glm4_moe_lite": DEEPSEEK_V3 | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "nemotron_h": {
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "moe"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 20,
        "ssm_state_size": 16,
        "n_groups": 2,
        "use_conv_bias": True,
    },
    "granitemoehybrid": {
        "num_local_experts": 8,
        "intermediate_size": 32,
        "shared_intermediate_size": 48,
        "embedding_multiplier": 6.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
    },
    **{
        name: FEW
        | {
            **{"num_experts": 8, "num_shared_experts": 1, "head_dim": 16, "sliding_window": 4},
            **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.5},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        }
        for name in ("exaone_moe", "mellum")
    },
    "afmoe": FEW
    | {
        **{"num_experts": 8, "num_shared_experts": 1, "head_dim": 16, "sliding_window": 4},
        **{"num_dense_layers": 1, "route_scale": 1.5, "mup_enabled": True},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "granitemoeshared": SMALL["granitemoe"] | {"shared_intermediate_size": 48},
    "lfm2_moe": FEW
    | {
        "num_experts": 8,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "mimo_v2_flash": FEW
    | {
        **{"num_local_experts": 8, "head_dim": 16, "v_head_dim": 12, "sliding_window": 4},
        **{"n_group": 2, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "laguna": FEW
    | {
        **{"num_experts": 8, "head_dim": 16, "shared_expert_intermediate_size": 48, "sliding_window": 4},
        **{"num_attention_heads_per_layer": [4, 8, 4], "moe_routed_scaling_factor": 1.5},
        **{"mlp_layer_types": ["dense", "sparse", "sparse"]},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "granitemoe_swa": SMALL["granitemoe"]
    | {
        **{"shared_intermediate_size": 48, "sliding_window": 4, "layer_rope_theta": [10000.0, 0, 500.0]},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "beam": FEW
    | {
        **{"num_experts": 8, "head_dim": 16, "sliding_window": 4, "n_group": 2, "topk_group": 1},
        **{"mlp_layer_types": ["dense", "sparse", "sparse"]},
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "flint": FEW
    | {
        **{"num_experts": 8, "head_dim": 16, "shared_expert_intermediate_size": 48, "sliding_window": 4},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "deepseek_v32": DEEPSEEK_V3
    | {
        **{"qk_rope_head_dim": 16, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 6},
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "axk1": DEEPSEEK_V3 | {"qk_rope_head_dim": 16},
    "axk2": DEEPSEEK_V3
    | {
        **{"qk_rope_head_dim": 16, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 6},
        **{"gated_norm_rank": 8, "n_group": 2, "topk_group": 1},
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "glm_moe_dsa": DEEPSEEK_V3
    | {
        **{"qk_rope_head_dim": 16, "index_n_heads": 4, "index_head_dim": 32, "index_topk": 6},
        **{"indexer_types": ["full", "shared", "full"], "mlp_layer_types": ["dense", "sparse", "sparse"]},
    },
    "mistral4": DEEPSEEK_V3 | {"qk_rope_head_dim": 16, "n_group": 2, "topk_group": 1},
    "kimi_linear": KIMI_DELTA,
    "bailing_hybrid": KIMI_DELTA | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "gemma4_text": FEW
    | {
        **{"num_experts": 8, "top_k_experts": 2, "enable_moe_block": True, "hidden_size_per_layer_input": 0},
        **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        **{"sliding_window": 4, "final_logit_softcapping": 2.0},
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "solar_open": {"moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "head_dim": 16},
    "hunyuan_v1_moe": {"num_experts": 8, "intermediate_size": 32, "head_dim": 16},
    "flex_olmo": {"num_experts": 8, "intermediate_size": 32},
    "aria_text": {
        "moe_num_experts": 8,
        "moe_topk": 2,
        "moe_num_shared_experts": 1,
        "intermediate_size": 32,
    },
    "kolibri1": FEW
    | {
        **{"num_experts": 8, "shared_expert_intermediate_size": 48, "head_dim": 16, "sliding_window": 4},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "cohere2_moe": {
        **{"num_experts": 8, "num_shared_experts": 1, "intermediate_size": 32, "head_dim": 16},
        **{"prefix_dense_intermediate_size": 96, "sliding_window": 4, "logit_scale": 0.3},
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "qwen3_vl_moe_text": FEW
    | {
        **{"num_experts": 8, "head_dim": 16},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    },
    "glm4v_moe_text": FEW
    | {
        **{"head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "mrope_section": [2, 1, 1],
        },
    },
}
"""Configs of families that files/folder_models.py tries in every other way."""

SEPARATE = tuple(name for name in SMALL if name not in ("granitemoe", "gpt_oss"))
"""Families with a tensor for each expert's matrix; the others only come fused."""

SHARPER = 4
SPREAD = {"e_score_correction_bias": 0.02, "sinks": 1.0, "gate_up_proj_bias": 0.5, "down_proj_bias": 0.2}
ONES = ("layer_scalar", "per_expert_scale", "scale")
"""Tensors of Gemma 4 that are all 1 at initialisation, as the weights of its norms are."""
LOUDER = 10
"""Factor on expert weights: at initialisation's 0.02 their share of the output would drown in rounding."""


def small_config(model_type: str, **changes: Any) -> Any:
    values = COMMON | (SMALL | OF_A_FOLDER)[model_type] | changes
    if model_type == "ernie4_5_moe":
        del values["num_experts_per_tok"]
    return AutoConfig.for_model(model_type, **values)


def random_model(model_type: str, **changes: Any) -> nn.Module:
    """In bf16 as far as transformers loads it so, with a head whose logits spread like a trained one's."""
    torch.manual_seed(0)
    model = _causal(small_config(model_type, **changes))
    precise = re.compile("|".join(model._keep_in_fp32_modules_strict or ["$^"]))
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            leaf = name.rpartition(".")[2]
            if leaf in SPREAD or leaf.endswith("bias"):
                # At initialisation they are zero, or too small to be missed.
                tensor.copy_(torch.randn_like(tensor) * SPREAD.get(leaf, 0.05))
            if leaf in ONES or "feedforward_layernorm" in name:
                tensor.mul_(1 + torch.randn_like(tensor) * 0.2)
            if leaf == "scale":
                tensor.mul_(model.config.hidden_size**0.5)  # its router divides by as much
            if leaf == "weight" and tensor.ndim == 2 and not tensor.any():
                # transformers 5.21 does not initialise the router of ernie4_5_moe.
                nn.init.normal_(tensor, std=model.config.initializer_range)
            if leaf == "e_score_correction_bias":
                # As in trained checkpoints, where bf16 could not tell them apart.
                tensor.add_(8)
            if ".experts." in name and not leaf.endswith("bias"):
                tensor.mul_(LOUDER)
        model.lm_head.weight.mul_(SHARPER)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not precise.search(name) and "inv_freq" not in name:
            tensor.data = tensor.data.to(torch.bfloat16)
    return model.eval()


def _causal(config: Any) -> Any:
    """A float32 model with a head, which transformers does not have for language models of multimodal ones."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return WithHead(AutoModel.from_config(config, dtype=torch.float32)).float()


def save(model: Any, directory: Path, *, fused: bool) -> Path:
    """Saves it as transformers does, with one tensor per expert's matrix, or one for all experts; with a tokenizer."""
    model.save_pretrained(directory, save_original_format=not fused)
    a_tokenizer().save_pretrained(directory)
    return directory


def load(directory: Path) -> nn.Module:
    """transformers' own model of a checkpoint, in bf16."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()


def blocks_of(model: nn.Module) -> list[Any]:
    """The modules with a router and experts, by layer."""
    names = [
        name.rpartition(".")[0] for name, module in model.named_modules() if hasattr(module, "_apply_gate")
    ]
    return [model.get_submodule(name) for name in names]


def router_of(block: Any) -> nn.Module:
    return block.gate if hasattr(block, "gate") else block.router


def router_weight(router: Any) -> torch.Tensor:
    """The weight of a router's product, which some routers have in a linear layer."""
    holders = (getattr(router, name, None) for name in ("gate", "proj", "wg"))
    weight: torch.Tensor = next((each for each in holders if each is not None), router).weight.data
    return weight
