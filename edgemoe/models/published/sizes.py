"""Sizes of published models, written by hand: from the defaults of transformers' config classes and the models' pages.

They are enough to plan memory without a download. A plan of a model's own files goes before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BF16, FP8, MXFP4 = "BF16", "FP8", "MXFP4"
"""Formats of experts in the files that people download."""

BITS = {BF16: 16.0, FP8: 8 + 32 / (128 * 128), MXFP4: 4.25}
"""Bits of an expert's weight in each, with its part of the scales."""


@dataclass(frozen=True)
class Published:
    """A model that people can download.

    Args:
        repository: organisation/name on the Hub.
        billions: parameters of the language model, as its page counts them.
        config: the fields of its config.json that sizes depend on; of a multimodal model, of its language model.
        experts: format of the experts in its files; other weights are BF16.
    """

    repository: str
    billions: float
    config: dict[str, Any]
    experts: str = BF16


def _config(
    model_type: str, layers: int, hidden: int, heads: int, vocabulary: int, *others: dict[str, Any]
) -> dict[str, Any]:
    """A config with the keys that every config must have, and others."""
    config: dict[str, Any] = {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "vocab_size": vocabulary,
    }
    for each in others:
        config |= each
    return config


def _routed(
    key: str, experts: int, top_k: int, inner: int, *, inner_key: str = "moe_intermediate_size"
) -> dict[str, Any]:
    """The fields of the experts: their number, how many a token has, and their inner size."""
    return {key: experts, "num_experts_per_tok": top_k, inner_key: inner}


_GPT_OSS = {
    **{"head_dim": 64, "num_key_value_heads": 8, "attention_bias": True, "sliding_window": 128},
    "max_position_embeddings": 131_072,
}

_QWEN_HYBRID = {
    **{"num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "shared_expert_intermediate_size": 512},
    "max_position_embeddings": 262_144,
}

PUBLISHED = {
    "Qwen3.6-35B-A3B": Published(
        "Qwen/Qwen3.6-35B-A3B",
        34.7,
        _config("qwen3_5_moe_text", 40, 2048, 16, 248_320, _QWEN_HYBRID, _routed("num_experts", 256, 8, 512)),
    ),
    "Gemma-4-26B-A4B": Published(
        "google/gemma-4-26B-A4B-it",
        25.2,
        _config(
            *("gemma4_text", 30, 2816, 16, 262_144),
            {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704, "enable_moe_block": True},
            {"intermediate_size": 2112, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024},
            {"global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
            {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262_144},
        ),
    ),
    "Nemotron-3-Nano-30B-A3B": Published(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        31.6,
        _config(
            *("nemotron_h", 52, 2688, 32, 131_072),
            _routed("n_routed_experts", 128, 6, 1856),
            {"hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"},
            {"num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 1856, "n_shared_experts": 1},
            {"moe_shared_expert_intermediate_size": 3712, "mamba_num_heads": 64, "mamba_head_dim": 64},
            {"ssm_state_size": 128, "n_groups": 8, "max_position_embeddings": 262_144},
        ),
    ),
    "Qwen3-30B-A3B": Published(
        "Qwen/Qwen3-30B-A3B",
        30.5,
        _config(
            *("qwen3_moe", 48, 2048, 32, 151_936),
            _routed("num_experts", 128, 8, 768),
            {"intermediate_size": 6144, "num_key_value_heads": 4, "head_dim": 128},
            {"max_position_embeddings": 40_960},
        ),
    ),
    "Qwen3-Next-80B-A3B": Published(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        79.7,
        _config(
            *("qwen3_next", 48, 2048, 16, 151_936),
            _QWEN_HYBRID,
            _routed("num_experts", 512, 10, 512),
            {"intermediate_size": 5120},
        ),
    ),
    "GLM-4.7-Flash": Published(
        "zai-org/GLM-4.7-Flash",
        29.9,
        _config(
            *("glm4_moe_lite", 47, 2048, 20, 154_880),
            _routed("n_routed_experts", 64, 4, 1536),
            {"intermediate_size": 10_240, "num_key_value_heads": 20, "n_shared_experts": 1},
            {"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64},
            {"v_head_dim": 256, "max_position_embeddings": 202_752},
        ),
    ),
    "GLM-4.5-Air": Published(
        "zai-org/GLM-4.5-Air",
        106.9,
        _config(
            *("glm4_moe", 46, 4096, 96, 151_552),
            _routed("n_routed_experts", 128, 8, 1408),
            {"intermediate_size": 10_944, "num_key_value_heads": 8, "head_dim": 128},
            {"attention_bias": True, "n_shared_experts": 1, "first_k_dense_replace": 1},
            {"max_position_embeddings": 131_072},
        ),
    ),
    "gpt-oss-20b": Published(
        "openai/gpt-oss-20b",
        20.9,
        _config(
            *("gpt_oss", 24, 2880, 64, 201_088),
            _GPT_OSS,
            _routed("num_local_experts", 32, 4, 2880, inner_key="intermediate_size"),
        ),
        MXFP4,
    ),
    "gpt-oss-120b": Published(
        "openai/gpt-oss-120b",
        116.8,
        _config(
            *("gpt_oss", 36, 2880, 64, 201_088),
            _GPT_OSS,
            _routed("num_local_experts", 128, 4, 2880, inner_key="intermediate_size"),
        ),
        MXFP4,
    ),
    "MiniMax-M2": Published(
        "MiniMaxAI/MiniMax-M2",
        228.7,
        _config(
            *("minimax_m2", 62, 3072, 48, 200_064),
            _routed("num_local_experts", 256, 8, 1536, inner_key="intermediate_size"),
            {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608},
        ),
        FP8,
    ),
    "Mixtral-8x7B": Published(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        46.7,
        _config(
            *("mixtral", 32, 4096, 32, 32_000),
            _routed("num_local_experts", 8, 2, 14_336, inner_key="intermediate_size"),
            {"num_key_value_heads": 8, "max_position_embeddings": 32_768},
        ),
    ),
    "DeepSeek-V2-Lite": Published(
        "deepseek-ai/DeepSeek-V2-Lite",
        15.7,
        _config(
            *("deepseek_v2", 27, 2048, 16, 102_400),
            _routed("n_routed_experts", 64, 6, 1408),
            {"intermediate_size": 10_944, "num_key_value_heads": 16, "n_shared_experts": 2},
            {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
            {"v_head_dim": 128, "first_k_dense_replace": 1, "max_position_embeddings": 163_840},
        ),
    ),
    "OLMoE-1B-7B": Published(
        "allenai/OLMoE-1B-7B-0924-Instruct",
        6.9,
        _config(
            *("olmoe", 16, 2048, 16, 50_304),
            _routed("num_experts", 64, 8, 1024, inner_key="intermediate_size"),
            {"num_key_value_heads": 16, "max_position_embeddings": 4096},
        ),
    ),
    "Phi-3.5-MoE": Published(
        "microsoft/Phi-3.5-MoE-instruct",
        41.9,
        _config(
            *("phimoe", 32, 4096, 32, 32_064),
            _routed("num_local_experts", 16, 2, 6400, inner_key="intermediate_size"),
            {"num_key_value_heads": 8, "attention_bias": True, "lm_head_bias": True},
            {"max_position_embeddings": 131_072},
        ),
    ),
}
"""The name that people know -> the model."""
