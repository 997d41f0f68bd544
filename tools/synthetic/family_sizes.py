"""Layer sizes of real models of several families, and transformers' configs of models with fewer layers and experts."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        }
        | {"head_dim": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "glm-4.5-air": (
        "glm4_moe",
        {
            "hidden_size": 4096,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
        }
        | {"head_dim": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "intermediate_size": 10944}
        | {"first_k_dense_replace": 1, "attention_bias": True},
    ),
    "minimax-m2": (
        "minimax_m2",
        {"hidden_size": 3072, "intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8}
        | {"head_dim": 128, "num_experts_per_tok": 8},
    ),
    "ernie-4.5-21b-a3b": ("ernie4_5_moe", {"moe_k": 6}),
    "gpt-oss-20b": ("gpt_oss", {"num_experts_per_tok": 4}),
    "qwen3-next-80b": ("qwen3_next", {"num_experts_per_tok": 10}),
    "qwen3.6-35b-a3b": (
        "qwen3_5_moe_text",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
        }
        | {"head_dim": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        }
        | {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        | {"v_head_dim": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "intermediate_size": 10944}
        | {"first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "glm-4.7-flash": (
        "glm4_moe_lite",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
        }
        | {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64}
        | {"v_head_dim": 256, "n_shared_experts": 1, "num_experts_per_tok": 4, "intermediate_size": 10240}
        | {"n_group": 1, "topk_group": 1},
    ),
    "nemotron-3-nano": (
        "nemotron_h",
        {
            "hidden_size": 2688,
            "moe_intermediate_size": 1856,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
        }
        | {"head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}
        | {"moe_shared_expert_intermediate_size": 3712, "num_experts_per_tok": 6}
        | {
            "layers_block_type": [
                "linear_attention",
                "moe",
                "full_attention",
                "moe",
                "linear_attention",
                "moe",
            ]
        },
    ),
    "gemma-4-26b-a4b": (
        "gemma4_text",
        {
            "hidden_size": 2816,
            "moe_intermediate_size": 704,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        }
        | {"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
        | {"intermediate_size": 2112, "enable_moe_block": True, "top_k_experts": 8, "sliding_window": 1024}
        | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0},
    ),
    "lfm2-8b-a1b": (
        "lfm2_moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 1792,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
        | {"num_experts_per_tok": 4, "num_dense_layers": 2, "intermediate_size": 7168}
        | {"layer_types": ["conv", "conv", "full_attention", "conv", "conv", "conv"]},
    ),
    "kimi-linear-48b-a3b": ("kimi_linear", {"num_experts_per_token": 8}),
    "ling-3.0-flash": ("bailing_hybrid", {}),
    "mistral-small-4": ("mistral4", {}),
    "a.x-k2-light": ("axk2", {}),
    "glm-5": ("glm_moe_dsa", {}),
    "mellum2-12b-a2.5b": ("mellum", {}),
    "mimo-v2-flash": ("mimo_v2_flash", {}),
    "hy3-preview": ("hy_v3", {}),
    "solar-open-100b": ("solar_open", {}),
    "kolibri-1": ("kolibri1", {}),
}
"""Model -> its family's model_type, and the values of its config that determine a layer's sizes, where they are not
transformers' own.
"""

WHOLE = {
    "qwen3-30b-a3b": (48, 128),
    "glm-4.5-air": (46, 128),
    "gpt-oss-20b": (24, 32),
    "qwen3-next-80b": (48, 512),
    "qwen3.6-35b-a3b": (40, 256),
    "deepseek-v2-lite": (27, 64),
}
"""Model -> its numbers of layers, and of experts in a layer."""


def config_of(name: str, layers: int, experts: int, vocab: int) -> Any:
    """transformers' config of a model with fewer layers and experts."""
    model_type, sizes = MODELS[name]
    known = AutoConfig.for_model(model_type).to_dict()
    counts = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    number = next(key for key in counts if key in known)
    common: dict[str, int | None] = {
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
    }
    common |= dict.fromkeys(
        ("pad_token_id", "bos_token_id", "eos_token_id")
    )  # theirs may not be in the vocabulary
    return AutoConfig.for_model(model_type, **{**sizes, **common, number: experts})
