"""A small random model of each folder of transformers that has experts, by shrinking its config's defaults."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from family_models import VOCABULARY
from small_tokenizer import a_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from edgemoe.families.table import TEXT_HALVES

EXPERTS = 8

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 48),
    "moe_shared_expert_intermediate_size": 48,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **{"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 16, "qk_head_dim": 24, "n_group": 2, "topk_group": 1, "sliding_window": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
    },
    **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16},
    **{"n_groups": 1, "ssm_state_size": 16, "mamba_chunk_size": 16, "chunk_size": 16},
    **{"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_nextn_predict_layers": 0},
}
"""Keys of configs; a config gets the ones that it has."""

_LATENT = {"num_key_value_heads": 4}
_MULTIPLIERS = {
    **{"intermediate_size": 32, "embedding_multiplier": 6.0, "attention_multiplier": 0.1},
    **{"residual_multiplier": 0.5, "logits_scaling": 2.0},
}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
_WINDOWS = {"layer_types": ["full_attention", "sliding_attention"] * 2}

_VISION = {
    **{"depth": 1, "num_heads": 2, "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64},
    **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "image_size": 28},
}
_GEMMA_VISION = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{
        "num_key_value_heads": 2,
        "head_dim": 16,
        "model_type": "gemma4_vision",
        "position_embedding_size": 256,
    },
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10000.0}

_CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "glm4_moe_lite": _LATENT,
    "axk1": _LATENT | {"head_dim": 8},
    "deepseek_v2": _LATENT | {"q_lora_rank": None},
    "deepseek_v3": _LATENT | {"head_dim": 8},
    "dots1": _WINDOWS,
    "cohere2_moe": {"logit_scale": 1.0},
    "granitemoe": _MULTIPLIERS,
    "granitemoeshared": _MULTIPLIERS,
    "granitemoe_swa": _MULTIPLIERS,
    "granitemoehybrid": _HYBRID | _MULTIPLIERS | {"mamba_n_heads": 8, "mamba_d_head": 16},
    "mimo_v2_flash": {"v_head_dim": 12},
    "gemma4_text": {
        **{
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "enable_moe_block": True,
            "top_k_experts": 2,
        },
        **{"num_global_key_value_heads": 1, "global_head_dim": 32, "hidden_size_per_layer_input": 0},
        "num_kv_shared_layers": 0,
    },
    **dict.fromkeys(("deepseek_v32", "axk2"), _LATENT),
    "glm_moe_dsa": _LATENT | {"indexer_types": ["full", "shared", "full", "shared"]},
    "mistral4": _LATENT
    | {
        **{"head_dim": 32, "qk_rope_head_dim": 16, "routed_scaling_factor": 1.5},
        "rope_parameters": {
            **{
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 32.0,
                "mscale": 0.7,
                "mscale_all_dim": 0.7,
            },
            **{"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5},
        },
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "kimi_linear": _LATENT | _HYBRID | {"linear_head_dim": 16, "linear_num_heads": 4},
    "bailing_hybrid": _LATENT | _HYBRID | {"n_group": 1, "topk_group": 1},
    "qwen3_vl_moe_text": {"rope_parameters": _SECTIONS | {"mrope_section": [4, 2, 2]}},
    "glm4v_moe_text": {
        "rope_parameters": _SECTIONS | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    },
}
"""model_type -> what is particular to it."""


def folder_config(model_type: str) -> Any:
    """transformers' config of a small model, with a small vision tower where it is multimodal."""
    kind = CONFIG_MAPPING[model_type]
    known = kind().to_dict()
    if model_type in TEXT_HALVES:
        text = folder_config(TEXT_HALVES[model_type]).to_dict()
        vision = _GEMMA_VISION if model_type == "gemma4" else _VISION
        small = {key: value for key, value in vision.items() if key in (known["vision_config"] or vision)}
        return kind(
            text_config=text, vision_config=small, tie_word_embeddings=bool(text.get("tie_word_embeddings"))
        )
    sizes = {key: value for key, value in _SIZES.items() if key in known}
    return kind(**sizes | _CHANGES.get(model_type, {}))


def folder_model(model_type: str) -> Any:
    """A model in bf16 as far as transformers loads it so; routers and experts decide as a trained model's do."""
    torch.manual_seed(0)
    model = _kind(model_type).from_config(folder_config(model_type), dtype=torch.float32)
    precise = re.compile("|".join(map(re.escape, model._keep_in_fp32_modules_strict or ())) or "$^")
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            _spread(name, tensor)
        model.get_output_embeddings().weight.mul_(4)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not precise.search(name) and "inv_freq" not in name:
            tensor.data = tensor.data.to(torch.bfloat16)
    return model.eval()


def _kind(model_type: str) -> Any:
    return AutoModelForImageTextToText if model_type in TEXT_HALVES else AutoModelForCausalLM


def load_folder_model(model_type: str, directory: Path) -> Any:
    """transformers' own model of a checkpoint, in bf16."""
    return _kind(model_type).from_pretrained(directory, dtype=torch.bfloat16).eval()


def _spread(name: str, tensor: torch.Tensor) -> None:
    """Gives a tensor values that matter: at initialisation biases are zero, weights of norms are all the same number,
    which rounds alike in every order, and experts drown in rounding."""
    leaf = name.rpartition(".")[2]
    if leaf == "weight" and tensor.ndim == 1:
        tensor.add_(torch.randn_like(tensor) * 0.1)
    if leaf in ("e_score_correction_bias", "expert_bias"):
        tensor.copy_(torch.randn_like(tensor) * 0.02 + 1)
    elif leaf == "sinks":
        tensor.copy_(torch.randn_like(tensor))
    elif leaf.endswith("bias") and leaf != "dt_bias":
        tensor.copy_(torch.randn_like(tensor) * 0.05)
    if leaf == "weight" and tensor.ndim == 2 and not tensor.any():
        nn.init.normal_(tensor, std=0.02)
    if re.search(r"(gate|router)(\.wg|\.gate|\.proj)?\.weight$", name) and tensor.shape[0] == EXPERTS:
        tensor.mul_(20)
    if ".experts." in name and "shared" not in name and tensor.ndim == 3:
        tensor.mul_(10)


def save_folder_model(model: Any, directory: Path) -> Path:
    """Saves it as transformers does, with a tokenizer."""
    # transformers calls the layers of Kimi-K2.5 by a name of its vision blocks where it restores the Hub's names.
    model.save_pretrained(directory, save_original_format=model.config.model_type != "kimi_k25")
    a_tokenizer().save_pretrained(directory)
    return directory
