"""Dense weights and routers out of a qwen3moe GGUF file, by transformers' names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import xxhash

from storage.errors import MissingTensor, ModelRefused, UserError
from tools.synthetic.workload import Shape

ROWS = 4096
"""Rows dequantized at a time, so that no whole tensor is ever there in float32."""

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
    """transformers' name of a Qwen3-MoE tensor in llama.cpp's naming."""
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name):
        return f"blk.{match[1]}.{GGUF_NAMES[match[2]]}.weight"
    return GGUF_NAMES[name.removesuffix(".weight")] + ".weight"


class Gguf:
    """The shape, dense weights and routers of a qwen3moe GGUF file.

    Raises:
        UserError: no GGUF, or the `gguf` package is missing.
        ModelRefused: a GGUF of another architecture.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf

            reader = gguf.GGUFReader(path)
        except (ImportError, OSError, ValueError) as error:
            advice = "Give a GGUF file, and install the package gguf"
            raise UserError(f"the dense weights of {path} were wanted", str(error), advice) from error
        self._path, self._dequantize = path, gguf.quants.dequantize
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        if (found := self._field("general.architecture")) != "qwen3moe":
            raise ModelRefused(
                f"a GGUF of qwen3moe was wanted at {path}", f"it is {found}", "Give another file"
            )

    def _field(self, name: str) -> Any:
        if name not in self._fields:
            raise MissingTensor(f"the field {name} was wanted", f"{self._path} has none", "Give another file")
        return self._fields[name].contents()

    def fingerprint(self) -> str:
        """Hash of the file's size, header and first tensors."""
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
            raise MissingTensor(
                f"the tensor {name} was wanted", f"{self._path} has none", "Give another file"
            )
        return self._tensors[name]

    def dense(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor by transformers' name, in bf16. Dequantized some rows at a time.

        Raises:
            MissingTensor: the file has none of that name and shape.
        """
        tensor = self._tensor(gguf_name(name))
        found = tuple(int(n) for n in reversed(tensor.shape))
        if found != shape:
            wanted = f"{gguf_name(name)} of shape {list(shape)} was wanted"
            raise MissingTensor(wanted, f"{self._path} has it as {list(found)}", "Give another file")
        out = torch.empty(shape, dtype=torch.bfloat16)
        for start in range(0, shape[0], ROWS):
            rows = self._dequantize(tensor.data[start : start + ROWS], tensor.tensor_type)
            out[start : start + ROWS] = torch.tensor(rows)
        return out
