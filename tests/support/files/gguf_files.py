"""GGUF files of small models, written by the gguf package in the form of llama.cpp's converter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_converter import NAMES, fields_of, tensors_of
from transformers import PreTrainedTokenizerFast

Kind = gguf.GGMLQuantizationType


_SCALES = {
    **dict.fromkeys((Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K), (0, 2)),
    **{Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q6_K: (208,), Kind.TQ1_0: (52,), Kind.TQ2_0: (64,)},
    **dict.fromkeys((Kind.IQ1_M, Kind.MXFP4, Kind.NVFP4), ()),
}
"""Type -> bytes of a block at which float16 scales begin; others have one at 0, or scales of other types."""


def blocks(kind: Kind, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random weights of a type as uint8 [..., bytes of a row]: random codes and small finite scales.

    The gguf package writes only some types, and reads any bytes with finite scales of all types.
    """
    generator = np.random.default_rng(seed)
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // weights
    raw = generator.integers(0, 256, (count, size), np.uint8)
    for at in _SCALES.get(kind, (0,)):
        scale = generator.uniform(0.0001, 0.001, (count, 1)).astype(np.float16)
        raw[:, at : at + 2] = scale.view(np.uint8)
    bad = ~np.isfinite(gguf.quants.dequantize(raw, kind)).all(1)
    raw[bad] = 0
    return raw.reshape(*shape[:-1], -1)


def write_model(
    path: Path,
    model: Any,
    tokenizer: PreTrainedTokenizerFast | None = None,
    experts: Callable[[str, torch.Tensor], tuple[np.ndarray, Kind]] | None = None,
    change: Mapping[str, Any] | None = None,
    part_tensors: int = 0,
    pre: str = "default",
) -> None:
    """Writes a transformers model of a type in NAMES of gguf_converter.

    Args:
        path: the path of the file.
        model: its expert weights become F16, all others F32.
        tokenizer: byte-level BPE.
        experts: (name in the file, weights [E, N, K]) -> bytes and type, instead of F16.
        change: metadata that replaces the model's own; None leaves it out.
        part_tensors: most tensors of a file, so that the model is split into several; 0: one file.
        pre: llama.cpp's name of the rules that split text.
    """
    config = model.config
    name = NAMES[config.model_type]
    writer = gguf.GGUFWriter(path, name, split_max_tensors=part_tensors)
    for key, value in (fields_of(config) | dict(change or {})).items():
        if value is not None:
            add = {
                float: writer.add_float32,
                str: writer.add_string,
                bool: writer.add_bool,
                list: writer.add_array,
            }
            add.get(type(value), writer.add_uint32)(f"{name}.{key}", value)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, pre)
    for new, tensor in tensors_of(model):
        if "_exps.weight" not in new:
            writer.add_tensor(new, tensor.contiguous().numpy())
        elif experts is None:
            writer.add_tensor(new, tensor.half().contiguous().numpy())
        else:
            raw, kind = experts(new, tensor)
            writer.add_tensor(new, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, pre: str) -> None:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    special = set(tokenizer.get_added_vocab())
    import json

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in special else 1 for token, _ in vocabulary])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(tokenizer.chat_template)


def rewritten(source: Path, target: Path, change: Any, **numbers: int) -> Path:
    """Copies a file with other tensors, and with more fields of its tokenizer."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen3moe")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = field.types[0]
        more = {"sub_type": field.types[-1]} if kind == gguf.GGUFValueType.ARRAY else {}
        writer.add_key_value(key, field.contents(), kind, **more)
    for key, value in numbers.items():
        writer.add_uint32(f"tokenizer.ggml.{key}", value)
    for name, data in change({each.name: np.array(each.data) for each in reader.tensors}).items():
        writer.add_tensor(name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
