"""A checkpoint whose conversion takes milliseconds: 2 layers of 3 experts, in two shards."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, EXPERTS, HIDDEN, INNER, HEAD = 2, 3, 64, 32, 32
CONFIG = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "tie_word_embeddings": True,
    "vocab_size": 40,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def tensors() -> dict[str, torch.Tensor]:
    """Every weight by name, in the model's order: random with a fixed seed."""
    random = torch.Generator().manual_seed(7)
    shapes = {"model.embed_tokens.weight": (40, HIDDEN)}
    for layer in range(LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        shapes[f"{attention}.q_proj.weight"] = shapes[f"{attention}.o_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{attention}.k_proj.weight"] = shapes[f"{attention}.v_proj.weight"] = (HEAD, HIDDEN)
        shapes[f"{attention}.q_norm.weight"] = shapes[f"{attention}.k_norm.weight"] = (HEAD,)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (HIDDEN,)
        shapes[f"model.layers.{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            shapes |= {f"{name}.gate_proj.weight": (INNER, HIDDEN), f"{name}.up_proj.weight": (INNER, HIDDEN)}
            shapes |= {f"{name}.down_proj.weight": (HIDDEN, INNER)}
    shapes["model.norm.weight"] = (HIDDEN,)
    return {name: torch.randn(shape, generator=random).bfloat16() for name, shape in shapes.items()}


def save_tokenizer(directory: Path) -> None:
    """Writes a tokenizer of one word."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (directory / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": model})
    )
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def save(directory: Path) -> Path:
    """Writes the checkpoint. The border between the shards lies inside an expert of layer 0."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_tokenizer(directory)
    everything = tensors()
    border = list(everything).index("model.layers.0.mlp.experts.1.down_proj.weight")
    parts = (list(everything)[:border], list(everything)[border:])
    for file, names in zip(SHARDS, parts, strict=True):
        save_file({name: everything[name] for name in names}, directory / file, {"format": "pt"})
    files = {name: file for file, names in zip(SHARDS, parts, strict=True) for name in names}
    (directory / INDEX).write_text(json.dumps({"weight_map": files}))
    return directory
