"""Small valid models of every form that edgemoe reads, for mutations: checkpoints, packed experts, GGUF, a store."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

from edgemoe.bench.synthetic.tokenizer import save_tokenizer
from edgemoe.bench.synthetic.workload import Shape
from edgemoe.families.table import TEXT_HALVES, family_of
from edgemoe.families.traits import TRAITS
from edgemoe.kernels.registry import compute
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.config import EXPERT_COUNT_KEYS, TOP_K_KEYS
from edgemoe.storage.convert.run import convert
from edgemoe.storage.files.header import header_bytes, tensor_bytes
from tools.reliability.mutators import gguf_bytes
from tools.synthetic.checkpoint import shards

SHAPE = Shape(hidden=64, layers=1, experts=2, inner=32, top_k=1, heads=4, kv_heads=2, head_dim=16, vocab=300)
_SHARD = 60_000
"""Bytes of a shard: the checkpoint has several."""
_GROUP = 32
_EXPERT = "model.layers.0.mlp.experts.{}.{}_proj"
_MATRICES = {
    _EXPERT.format(expert, part): (SHAPE.hidden, SHAPE.inner)
    if part == "down"
    else (SHAPE.inner, SHAPE.hidden)
    for expert in range(SHAPE.experts)
    for part in ("gate", "up", "down")
}
"""Name without its last part -> (outputs, inputs) of every expert's matrix."""

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> safetensors' dtype, and shape."""

FAMILIES = (*TRAITS, *TEXT_HALVES)
"""The model_type of every supported family, and of multimodal models."""


def write_checkpoint(directory: Path) -> Path:
    """A checkpoint in bf16 whose weights are 0, in shards, with a tokenizer and a generation_config.json."""
    directory.mkdir(parents=True)
    SHAPE.config().save_pretrained(directory)
    save_tokenizer(SHAPE.vocab, directory)
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards(SHAPE, _SHARD)):
        tensors = {name: ("BF16", shape) for name, shape in shapes.items()}
        data = bytes(sum(tensor_bytes(*spec) for spec in tensors.values()))
        (directory / f"{number}.safetensors").write_bytes(header_bytes(tensors, {"format": "pt"}, 8) + data)
        weight_map |= dict.fromkeys(tensors, f"{number}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "eos_token_id": [2, 0]}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return directory


def write_store(directory: Path) -> Path:
    """The store of such a checkpoint."""
    return _converted(write_checkpoint(directory / "source"), directory)


def write_mixed_store(directory: Path) -> Path:
    """The store of a checkpoint with codes of 4 and of 8 bits."""
    return _converted(write_packed(directory / "source", "mixed"), directory)


def _converted(source: Path, directory: Path) -> Path:
    convert(
        source,
        directory / "store",
        family_of(Checkpoint.open(source).config),
        max_level=None,
        layout=compute().layout,
        dense_bits=16,
        progress=lambda done, total: None,
        threads=1,
    )
    return directory / "store"


_OWN_SIZES: dict[str, dict[str, Any]] = {
    "hunyuan_v1_moe": {"head_dim": 16},
    "dots1": {"n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "flint": {"mlp_only_layers": [0]},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2},
    "glm4v_moe_text": {
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10_000.0},
            **{"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        }
    },
}
"""Sizes without which a family's small config has no experts, or sizes that disagree."""


def write_config(directory: Path, model_type: str) -> Path:
    """The config.json of a small model of a family, with every key that transformers writes.

    For a multimodal model it is its language model's config, within the keys of the whole one.
    """
    directory.mkdir(parents=True)
    config = _small_config(TEXT_HALVES.get(model_type, model_type))
    if model_type in TEXT_HALVES:
        config = {"model_type": model_type, "text_config": config, "vision_config": {"depth": 1}}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _small_config(model_type: str) -> dict[str, Any]:
    from transformers import AutoConfig

    sizes = {
        **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"vocab_size": 300, "max_position_embeddings": 512, "pad_token_id": 0, "intermediate_size": 96},
        **dict.fromkeys(EXPERT_COUNT_KEYS, 8),
        **dict.fromkeys(TOP_K_KEYS, 2),
        **{"moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    }
    own = _OWN_SIZES.get(model_type, {})
    config: dict[str, Any] = AutoConfig.for_model(model_type, **sizes | own).to_dict()
    return config | {"model_type": model_type}


def write_packed(directory: Path, method: str) -> Path:
    """A checkpoint whose experts are packed by a quant_method of config.json's quantization_config, all codes zero.

    Args:
        directory: the checkpoint's directory.
        method: a quant_method; or `mixed` or `nvfp4`, which are compressed-tensors with several schemes, and with FP4.
    """
    settings, tensors = _mxfp4() if method == "mxfp4" else _packed(method)
    family = "gpt_oss" if method == "mxfp4" else "qwen3_moe"
    inner = "intermediate_size" if method == "mxfp4" else "moe_intermediate_size"
    count = "num_local_experts" if method == "mxfp4" else "num_experts"
    config: dict[str, Any] = {
        **{
            "model_type": family,
            "hidden_size": SHAPE.hidden,
            "num_hidden_layers": 1,
            "vocab_size": SHAPE.vocab,
        },
        **{"num_attention_heads": SHAPE.heads, count: SHAPE.experts},
        **{inner: SHAPE.inner, "num_experts_per_tok": SHAPE.top_k, "quantization_config": settings},
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    tensors["model.norm.weight"] = "BF16", (SHAPE.hidden,)
    data = b"".join(_data(name, *spec) for name, spec in tensors.items())
    (directory / "model.safetensors").write_bytes(header_bytes(tensors, {}, 8) + data)
    return directory


def _data(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Zeros; where the format stores them, a matrix's shape or the group of every input."""
    if name.endswith("g_idx"):
        return struct.pack(f"<{shape[0]}i", *(i // _GROUP for i in range(shape[0])))
    if name.endswith("weight_global_scale"):
        return struct.pack("<f", 1.0)
    if name.endswith("weight_shape"):
        return struct.pack("<2q", *_MATRICES[name.removesuffix(".weight_shape")])
    return bytes(tensor_bytes(dtype, shape))


def _packed(method: str) -> tuple[dict[str, Any], Tensors]:
    """The quantization_config, and the tensors of experts with one tensor per matrix."""
    coded = {"bits": 4, "group_size": _GROUP}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP, "symmetric": True}
    dynamic = {"-:lm_head": {}, "+:.*down": {"bits": 8, "group_size": _GROUP}}
    fp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    own: dict[str, dict[str, Any]] = {
        "gptq": coded | {"desc_act": False, "checkpoint_format": "gptq", "dynamic": dynamic},
        "auto-round": coded
        | {"packing_format": "auto_round:auto_gptq", "sym": True, "extra_config": {"lm_head": {"bits": 16}}},
        "awq": coded | {"version": "gemm", "zero_point": True},
        "fp8": {"fmt": "e4m3", "weight_block_size": [128, 128]},
        "compressed-tensors": {
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | {"actorder": None}}},
        },
        "mixed": {
            "format": "mixed-precision",
            "config_groups": {
                "group_0": {"targets": ["re:.*_proj"], "weights": weights},
                "group_1": {"targets": ["re:.*down_proj"], "weights": weights | {"num_bits": 8}},
            },
        },
        "nvfp4": {"format": "nvfp4-pack-quantized", "config_groups": {"group_0": {"weights": fp4}}},
    }
    parts = {
        name: _parts(method, *sides, bits=8 if method == "mixed" and "down" in name else 4)
        for name, sides in _MATRICES.items()
    }
    named = "compressed-tensors" if method in ("mixed", "nvfp4") else method
    return {"quant_method": named} | own[method], {
        f"{name}.{part}": spec for name, made in parts.items() for part, spec in made.items()
    }


def _parts(method: str, rows: int, columns: int, *, bits: int) -> Tensors:
    """The parts of one packed matrix, of codes of `bits` bits where there are several schemes."""
    groups = columns // _GROUP
    gptq: Tensors = {
        "qweight": ("I32", (columns // 8, rows)),
        "qzeros": ("I32", (groups, rows // 8)),
        "scales": ("F16", (groups, rows)),
    }
    known: dict[str, Tensors] = {
        "gptq": gptq | {"g_idx": ("I32", (columns,))},
        "auto-round": gptq,
        "awq": gptq | {"qweight": ("I32", (columns, rows // 8))},
        "fp8": {"weight": ("F8_E4M3", (rows, columns)), "weight_scale_inv": ("F32", (1, 1))},
        "compressed-tensors": {
            "weight_packed": ("I32", (rows, columns // 8)),
            "weight_scale": ("BF16", (rows, groups)),
            "weight_shape": ("I64", (2,)),
        },
        "nvfp4": {
            "weight_packed": ("U8", (rows, columns // 2)),
            "weight_scale": ("F8_E4M3", (rows, columns // 16)),
            "weight_global_scale": ("F32", (1,)),
        },
    }
    known["mixed"] = known["compressed-tensors"] | {"weight_packed": ("I32", (rows, columns * bits // 32))}
    return known[method]


def _mxfp4() -> tuple[dict[str, Any], Tensors]:
    experts, rows = SHAPE.experts, 2 * SHAPE.inner
    up, down = (f"model.layers.0.mlp.experts.{part}_proj" for part in ("gate_up", "down"))
    return {"quant_method": "mxfp4"}, {
        f"{up}_blocks": ("U8", (experts, rows, SHAPE.hidden // 32, 16)),
        f"{up}_scales": ("U8", (experts, rows, SHAPE.hidden // 32)),
        f"{down}_blocks": ("U8", (experts, SHAPE.hidden, SHAPE.inner // 32, 16)),
        f"{down}_scales": ("U8", (experts, SHAPE.hidden, SHAPE.inner // 32)),
    }


def gguf_model() -> tuple[dict[str, Any], dict[str, list[Any]], bytes]:
    """Fields, tensors and data of a GGUF file, as mutate_gguf takes them; without a tokenizer's merges."""
    own = {
        **{"embedding_length": SHAPE.hidden, "block_count": 1, "attention.head_count": SHAPE.heads},
        **{"attention.head_count_kv": SHAPE.kv_heads, "attention.layer_norm_rms_epsilon": 1e-6},
        **{"context_length": 512, "rope.freq_base": 1e6, "expert_used_count": SHAPE.top_k},
        **{"expert_count": SHAPE.experts, "attention.key_length": SHAPE.head_dim},
        "expert_feed_forward_length": SHAPE.inner,
    }
    fields = {
        "general.architecture": "qwen3moe",
        **{f"qwen3moe.{key}": value for key, value in own.items()},
        **{
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": ["a", "b"],
            "tokenizer.ggml.eos_token_id": 1,
        },
        **{
            "general.alignment": 32,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.scores": [0.0, 1.0],
        },
    }
    shapes = {"token_embd": (SHAPE.vocab, SHAPE.hidden), "output_norm": (SHAPE.hidden,)}
    for part in ("gate", "up", "down"):
        sides = (SHAPE.hidden, SHAPE.inner) if part == "down" else (SHAPE.inner, SHAPE.hidden)
        shapes[f"blk.0.ffn_{part}_exps"] = (SHAPE.experts, *sides)
    tensors: dict[str, list[Any]] = {}
    at = 0
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = [list(reversed(shape)), 0, at]  # 0: F32
        at += -(-4 * prod(shape) // 32) * 32
    return fields, tensors, bytes(at)


def write_gguf(directory: Path) -> Path:
    """Writes the GGUF file of `gguf_model`."""
    directory.mkdir(parents=True)
    (directory / "model.gguf").write_bytes(gguf_bytes(*gguf_model()))
    return directory
