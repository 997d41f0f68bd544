"""GGUF files of each architecture that have all fields and few tensors, for mutations of their configs."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.formats.gguf_architectures import ARCHITECTURES
from edgemoe.storage.formats.gguf_model import GgufModel
from tools.reliability.mutators import gguf_bytes
from tools.reliability.samples import SHAPE

_GGUF_FIELDS: dict[str, Any] = {
    **{"embedding_length": SHAPE.hidden, "block_count": 4, "attention.head_count": SHAPE.heads},
    **{"attention.head_count_kv": [0, SHAPE.kv_heads, 0, SHAPE.kv_heads], "expert_count": SHAPE.experts},
    **{"expert_used_count": SHAPE.top_k, "attention.layer_norm_rms_epsilon": 1e-6, "context_length": 512},
    **{"rope.freq_base": 1e6, "feed_forward_length": SHAPE.inner, "expert_feed_forward_length": SHAPE.inner},
    **{"attention.key_length": SHAPE.head_dim, "attention.value_length": SHAPE.head_dim},
    **{"rope.dimension_count": SHAPE.head_dim // 2, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    **{"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.25},
    **{"expert_shared_count": 1, "expert_shared_feed_forward_length": SHAPE.inner, "expert_gating_func": 2},
    **{"expert_weights_scale": 2.5, "expert_weights_norm": True, "leading_dense_block_count": 1},
    **{"expert_group_count": 2, "expert_group_used_count": 1, "interleave_moe_layer_step": 1},
    **{"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4},
    **{"ssm.inner_size": 64, "full_attention_interval": 2, "shortconv.l_cache": 3},
    **{"attention.kv_lora_rank": 32, "attention.q_lora_rank": 24, "attention.key_length_mla": 24},
    **{"attention.value_length_mla": 16, "attention.sliding_window": 8, "attention.shared_kv_layers": 0},
    **{"attention.sliding_window_pattern": [True, False] * 2, "attention.key_length_swa": 16},
    **{"attention.value_length_swa": 16, "rope.freq_base_swa": 1e4, "embedding_length_per_layer_input": 0},
    **dict.fromkeys(("embedding_scale", "attention.scale", "residual_scale", "logit_scale"), 0.5),
}
"""Fields that some architecture reads; the readers of others ignore them."""


_HYBRID = ("lfm2moe", "granitehybrid", "nemotron_h_moe")
"""Architectures whose files have heads of keys by layer."""

_WITHOUT_GATE = ("nemotron_h_moe",)
"""Architectures whose experts have no gate."""


def gguf_config(architecture: str) -> tuple[dict[str, Any], dict[str, list[Any]], bytes] | None:
    """Fields, tensors and data of a GGUF file of an architecture without most of its tensors, as gguf_model.

    Returns:
        None where no architecture has that name.
    """
    if architecture not in ARCHITECTURES:
        return None
    heads = _GGUF_FIELDS["attention.head_count_kv"]
    own = _GGUF_FIELDS | {"attention.head_count_kv": heads if architecture in _HYBRID else max(heads)}
    fields = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in own.items()},
        **{"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 2},
    }
    hidden, experts, inner = SHAPE.hidden, SHAPE.experts, SHAPE.inner
    shapes = {
        **{"token_embd": (64, hidden), "output_norm": (hidden,), "blk.0.attn_norm": (hidden,)},
        **{"blk.1.attn_q": (SHAPE.heads * SHAPE.head_dim, hidden), "blk.1.ffn_gate_inp": (experts, hidden)},
        "blk.1.ffn_up_exps": (experts, inner, hidden),
        "blk.1.ffn_down_exps": (experts, hidden, inner),
    }
    if architecture not in _WITHOUT_GATE:
        shapes["blk.1.ffn_gate_exps"] = shapes["blk.1.ffn_up_exps"]
    tensors: dict[str, list[Any]] = {}
    at = 0
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = [list(reversed(shape)), 0, at]  # 0: F32
        at += -(-4 * prod(shape) // 32) * 32
    return fields, tensors, bytes(at)


def write_gguf_configs(directory: Path) -> list[Path]:
    """Such a file of each architecture, by its name."""
    made = []
    for name in ARCHITECTURES:
        if (sample := gguf_config(name)) is not None:
            made.append(directory / f"{name}.gguf")
            made[-1].write_bytes(gguf_bytes(*sample))
    return made


def read_gguf_config(path: Path) -> None:
    """Reads the config that a GGUF file's fields make, and the first slice of each of its tensors."""
    model = GgufModel(path)
    bounded_config(model.config)
    for weight in model.weights().values():
        weight.read_slice(0)
