"""A small model of each family that GGUF files are read of, and its file."""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from folder_models import EXPERTS, folder_config
from gguf_converter import NAMES
from gguf_files import write_model
from small_tokenizer import a_tokenizer
from transformers import AutoModelForCausalLM

SECTIONS: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
    **{"beta_fast": 32.0, "beta_slow": 1.0},
}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "mixtral": {"sliding_window": None},
    "olmoe": {"num_key_value_heads": 4},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "gpt_oss": {"rope_parameters": YARN | {"truncate": False}},
    "glm4_moe": {"head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    "deepseek_v2": {
        "q_lora_rank": 24,
        "n_group": 1,
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse"]},
    "minimax_m2": {"rope_parameters": SECTIONS | {"partial_rotary_factor": 0.5}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "tie_word_embeddings": True},
    "dots1": {"num_key_value_heads": 4, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_group": 1},
    "gemma4_text": {
        **{"layer_types": ["sliding_attention", "full_attention"], "attention_k_eq_v": True},
        **{"global_head_dim": 32, "num_global_key_value_heads": 1, "final_logit_softcapping": 30.0},
    },
    "phimoe": {
        "attention_bias": True,
        "lm_head_bias": True,
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128},
            **{
                "short_factor": [1.0] * 8,
                "long_factor": [1.5] * 8,
                "short_mscale": 1.25,
                "long_mscale": 1.25,
            },
        },
    },
}
"""model_type -> what is particular to it, in two layers."""


def covered(model_types: Iterable[str], slow: Container[str] = ()) -> list[Any]:
    """Model types, as tests of their architectures' rows in docs/models.md; the `slow` ones are marked e2e."""
    return [
        pytest.param(
            model_type,
            marks=[
                pytest.mark.covers(f"GGUF {NAMES[model_type]}"),
                *([pytest.mark.e2e] if model_type in slow else []),
            ],
        )
        for model_type in model_types
    ]


def small_model(model_type: str) -> Any:
    """Two layers in float32, with values in all norms and biases."""
    base = folder_config(model_type).to_dict() | {"num_hidden_layers": 2}
    for by_layer in ("layer_types", "per_layer_config"):
        base.pop(by_layer, None)
    config = type(folder_config(model_type)).from_dict(base | CHANGES.get(model_type, {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point() and tensor.ndim < 3 and float(tensor.detach().std()) < 0.01:
            tensor.data += torch.randn_like(tensor) * 0.1
        if tensor.ndim == 3 and len(tensor) == EXPERTS:
            tensor.data = (tensor.data * 10).half().float()
    return model.eval()


def write_small(model: Any, path: Path, **options: Any) -> Path:
    """Writes a model's file, with a tokenizer; `options` as in write_model."""
    pre = "glm4" if model.config.model_type == "glm4_moe_lite" else "default"
    write_model(path, model, a_tokenizer(), pre=pre, **options)
    return path
