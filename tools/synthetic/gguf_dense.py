"""Reads dense weights and routers from a qwen3moe GGUF file by transformers' names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import xxhash

from edgemoe.bench.synthetic.workload import Shape
from edgemoe.errors import MissingTensor, ModelRefused, UserError

ROWS = 4096
"""Rows dequantized at a time, so that no whole tensor is in memory in float32."""

GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name for transformers' name of a Qwen3-MoE tensor."""
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name):
        return f"blk.{match[1]}.{GGUF_NAMES[match[2]]}.weight"
    return GGUF_NAMES[name.removesuffix(".weight")] + ".weight"


class Gguf:
    """The shape, dense weights and routers of a qwen3moe GGUF file.

    Raises:
        UserError: the file is no GGUF, or the package gguf is not installed.
        ModelRefused: the GGUF has another architecture.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf

            reader = gguf.GGUFReader(path)
        except (ImportError, OSError, ValueError) as error:
            advice = "name a GGUF file, and install the package gguf"
            raise UserError(f"a readable GGUF at {path}", str(error), advice) from error
        self._path, self._dequantize = path, gguf.quants.dequantize
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        if (found := self._field("general.architecture")) != "qwen3moe":
            raise ModelRefused(f"the architecture qwen3moe in {path}", found, "name another file")

    def _field(self, name: str) -> Any:
        if name not in self._fields:
            raise MissingTensor(f"the field {name} in {self._path}", "none", "name another file")
        return self._fields[name].contents()

    def fingerprint(self) -> str:
        """A hash of the file's size, header and first tensors."""
        with self._path.open("rb") as file:
            return f"{self._path.stat().st_size}-{xxhash.xxh3_64_hexdigest(file.read(1 << 26))}"

    def shape(self) -> Shape:
        """The model's sizes."""

        def field(name: str) -> Any:
            return self._field(f"qwen3moe.{name}")

        return Shape(
            hidden=field("embedding_length"),
            layers=field("block_count"),
            experts=field("expert_count"),
            inner=field("expert_feed_forward_length"),
            top_k=field("expert_used_count"),
            heads=field("attention.head_count"),
            kv_heads=field("attention.head_count_kv"),
            head_dim=field("attention.key_length"),
            vocab=int(self._tensor("token_embd.weight").shape[1]),
            rope_theta=field("rope.freq_base"),
            eps=field("attention.layer_norm_rms_epsilon"),
            tied="output.weight" not in self._tensors,
        )

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise MissingTensor(f"the tensor {name} in {self._path}", "none", "name another file")
        return self._tensors[name]

    def dense(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Reads a tensor by transformers' name and shape in bf16, ROWS rows at a time.

        Raises:
            MissingTensor: the file has no tensor of this name and shape.
        """
        tensor = self._tensor(gguf_name(name))
        found = tuple(int(n) for n in reversed(tensor.shape))
        if found != shape:
            wanted = f"{gguf_name(name)} of shape {list(shape)} in {self._path}"
            raise MissingTensor(wanted, str(list(found)), "name another file")
        out = torch.empty(shape, dtype=torch.bfloat16)
        for start in range(0, shape[0], ROWS):
            rows = self._dequantize(tensor.data[start : start + ROWS], tensor.tensor_type)
            out[start : start + ROWS] = torch.tensor(rows)
        return out
