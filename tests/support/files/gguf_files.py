"""GGUF files of small models, written by the gguf package in the form of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

Kind = gguf.GGMLQuantizationType

TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
}
"""Names in transformers' modules, of which a layer has some."""

NAMES = {"qwen3_moe": "qwen3moe", "mixtral": "llama", "olmoe": "olmoe", "granitemoe": "granitemoe"}
SCALES_AT = {
    **dict.fromkeys((Kind.Q4_0, Kind.Q5_0, Kind.Q8_0), (0,)),
    **dict.fromkeys((Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K), (0, 2)),
    Kind.Q6_K: (208,),
}
"""Type -> places of its float16 scales in a block."""

PAIRED = ("llama", "granitemoe")
"""Architectures whose rotary embedding turns neighbouring rows."""


def blocks(kind: Kind, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random weights of a type as uint8 [..., bytes of a row]: random codes and small finite scales.

    The gguf package writes only some types, and reads any bytes with finite scales of all types.
    """
    generator = np.random.default_rng(seed)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // weights
    raw = generator.integers(0, 256, (count, size), np.uint8)
    for at in SCALES_AT[kind]:
        scale = generator.uniform(0.0001, 0.001, (count, 1)).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of llama.cpp's rotary embedding: rows i and i + half of a head interleaved."""
    half = weight.shape[0] // heads // 2
    order = [
        h * 2 * half + pair + side * half for h in range(heads) for pair in range(half) for side in (0, 1)
    ]
    return weight[order]


def write_model(
    path: Path,
    model: Any,
    tokenizer: PreTrainedTokenizerFast | None = None,
    experts: Callable[[str, torch.Tensor], tuple[np.ndarray, Kind]] | None = None,
    change: Mapping[str, Any] | None = None,
    part_tensors: int = 0,
) -> None:
    """Writes a transformers model of a type in NAMES.

    Args:
        path: of the file.
        model: its expert weights become F16, all others F32.
        tokenizer: byte-level BPE.
        experts: (name in the file, weights [E, N, K]) -> bytes and type, instead of F16.
        change: metadata that replaces the model's own; None leaves it out.
        part_tensors: most tensors of a file, so that the model is split into several; 0: one file.
    """
    config = model.config
    name = NAMES[config.model_type]
    writer = gguf.GGUFWriter(path, name, split_max_tensors=part_tensors)
    state = model.state_dict()
    router = next(name for name in state if name.endswith(("mlp.gate.weight", "router.weight")))
    fields = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "context_length": config.max_position_embeddings,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_used_count": config.num_experts_per_tok,
        "expert_count": state[router].shape[0],
        "feed_forward_length": config.intermediate_size,
    }
    if name == "qwen3moe":
        fields |= {
            "attention.key_length": config.head_dim,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if name == "granitemoe":
        fields |= {
            "embedding_scale": float(config.embedding_multiplier),
            "attention.scale": float(config.attention_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
        }
    for key, value in (fields | dict(change or {})).items():
        if value is not None:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            (writer.add_string if isinstance(value, str) else add)(f"{name}.{key}", value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    for outside, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
    ):
        writer.add_tensor(f"{theirs}.weight", state[f"{outside}.weight"].float().numpy())
    for layer in range(config.num_hidden_layers):
        _add_layer(writer, layer, state, config, experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_layer(
    writer: gguf.GGUFWriter, layer: int, state: Mapping[str, torch.Tensor], config: Any, experts: Any
) -> None:
    prefix = f"model.layers.{layer}."
    for name, theirs in TENSORS.items():
        if f"{prefix}{name}.weight" not in state:
            continue
        weight = state[f"{prefix}{name}.weight"].float()
        if NAMES[config.model_type] in PAIRED and theirs in ("attn_q", "attn_k"):
            weight = paired(
                weight, config.num_attention_heads if theirs == "attn_q" else config.num_key_value_heads
            )
        writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight.contiguous().numpy())
    block = f"{prefix}{'block_sparse_moe' if config.model_type == 'granitemoe' else 'mlp'}.experts."
    gate, up = state[f"{block}gate_up_proj"].chunk(2, 1)
    for part, weight in (("gate", gate), ("up", up), ("down", state[f"{block}down_proj"])):
        whole = f"blk.{layer}.ffn_{part}_exps.weight"
        if experts is None:
            writer.add_tensor(whole, weight.half().contiguous().numpy())
        else:
            raw, kind = experts(whole, weight.float())
            writer.add_tensor(whole, raw, raw_dtype=kind)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = set(tokenizer.get_added_vocab())
    import json

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocabulary])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)
