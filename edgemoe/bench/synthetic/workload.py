"""A Qwen3-MoE of any size with random weights: its shapes, dense tensors and experts' records."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from edgemoe.errors import UserError
from edgemoe.kernels.registry import compute
from edgemoe.storage.record.encode import Quantized, assemble
from edgemoe.storage.record.layout import Layout
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.record.planes import Bytes, quantize

POOL = 1 << 17
"""Distinct groups that an expert's matrix is drawn from: eight times as many as the largest matrix of a preset has."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3-MoE model."""

    hidden: int
    layers: int
    experts: int
    inner: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float = 1e6
    eps: float = 1e-6
    tied: bool = False

    def config(self) -> Any:
        """The shape as transformers' Qwen3MoeConfig."""
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            architectures=["Qwen3MoeForCausalLM"],
            dtype="bfloat16",
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            moe_intermediate_size=self.inner,
            norm_topk_prob=True,
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            rms_norm_eps=self.eps,
            tie_word_embeddings=self.tied,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=0,
        )

    def geometry(self, max_level: int) -> RecordGeometry:
        """The geometry of an expert's record."""
        gate_up = MatrixSpec.of("gate_up", 2 * self.inner, self.hidden)
        return RecordGeometry((gate_up, MatrixSpec.of("down", self.hidden, self.inner)), max_level)

    def dense(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every dense tensor, routers included, by transformers' names."""
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "input_layernorm": (self.hidden,),
            "self_attn.q_proj": (width, self.hidden),
            "self_attn.k_proj": (kv_width, self.hidden),
            "self_attn.v_proj": (kv_width, self.hidden),
            "self_attn.o_proj": (self.hidden, width),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "post_attention_layernorm": (self.hidden,),
            "mlp.gate": (self.experts, self.hidden),
        }
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for i in range(self.layers):
            out |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        out["model.norm.weight"] = (self.hidden,)
        return out if self.tied else out | {"lm_head.weight": (self.vocab, self.hidden)}


PRESETS = {
    "qwen3-30b-a3b": Shape(2048, 48, 128, 768, 8, 32, 4, 128, 151936),
    "demo": Shape(256, 6, 32, 96, 4, 8, 4, 32, 4096, rope_theta=1e4, tied=True),
    "small": Shape(256, 2, 8, 256, 2, 4, 2, 64, 4096),
    "tiny": Shape(64, 2, 8, 32, 2, 4, 2, 16, 320),
}


def generator(seed: int, name: str) -> torch.Generator:
    """A generator that depends on the seed and a tensor's name only, so that a run can resume at any tensor."""
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)


def random_dense(model: Shape, seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Draws a dense tensor of a model in bf16 by name and shape: ones for norms, Gaussian otherwise.

    Router rows are scaled so that experts differ in popularity. Embeddings have variance 1, and attention's output
    shrinks with the model's depth: otherwise the hidden states of all positions become nearly equal, greedy decoding
    repeats one token, and that token's experts are always resident.
    """
    out = torch.ones(shape, dtype=torch.bfloat16)
    if len(shape) == 1:
        return out
    random, deviation = generator(seed, name), shape[1] ** -0.5
    if "embed_tokens" in name:
        deviation = 1.0
    elif "o_proj" in name:
        deviation *= 2 * model.layers**-0.5
    out.normal_(0, deviation, generator=random)
    if name.endswith("mlp.gate.weight"):
        out *= torch.empty(shape[0], 1).log_normal_(0, 0.35, generator=random)
    return out


class ExpertPool:
    """Draws experts whose matrices look like quantized Gaussians with variance 1 / inputs.

    Args:
        geometry: geometry of the records.
        seed: determines an expert's bytes together with its layer and number.
        layout: layout of the records; None: the layout of this machine's CPU.

    Raises:
        UserError: a matrix needs padding, which random groups would not leave zero.
    """

    def __init__(self, geometry: RecordGeometry, seed: int, layout: Layout | None = None) -> None:
        for spec in geometry.matrices:
            if (spec.rows, spec.cols) != (spec.padded_rows, spec.padded_cols):
                wanted = f"rows in multiples of 16 and columns in multiples of {spec.group}"
                found = f"{spec.name} of {spec.rows} x {spec.cols}"
                raise UserError(wanted, found, "choose another shape")
        self._geometry, self._seed, self._layout = geometry, seed, layout or compute().layout
        self._groups = [self._quantized_groups(spec) for spec in geometry.matrices]

    def _quantized_groups(self, spec: MatrixSpec) -> Quantized:
        """Codes uint8 [POOL, group] and parameters bf16 [POOL, 2]."""
        weights = torch.empty(POOL, spec.group)
        weights.normal_(0, spec.cols**-0.5, generator=generator(self._seed, f"pool.{spec.name}"))
        codes, parameters = quantize(weights, spec.group)
        return codes, parameters[0]

    def records(self, layer: int, count: int) -> Iterator[Bytes]:
        """Yields the records of a layer's experts in order; threads make up to four per core in advance."""
        threads = os.cpu_count() or 1
        with ThreadPoolExecutor(threads) as pool:
            for start in range(0, count, 4 * threads):
                made = range(start, min(start + 4 * threads, count))
                yield from pool.map(lambda expert: self._record(layer, expert), made)

    def _record(self, layer: int, expert: int) -> Bytes:
        random = generator(self._seed, f"experts.{layer}.{expert}")
        matrices = [
            self._draw(spec, groups, random)
            for spec, groups in zip(self._geometry.matrices, self._groups, strict=True)
        ]
        return assemble(self._geometry, self._layout, matrices)

    @staticmethod
    def _draw(spec: MatrixSpec, groups: Quantized, random: torch.Generator) -> Quantized:
        codes, parameters = groups
        pick = torch.randint(POOL, (spec.rows, spec.cols // spec.group), generator=random)
        drawn = codes[pick.view(-1)].view(spec.rows, spec.cols)
        return drawn, parameters[pick.view(-1)].view(*pick.shape, 2).transpose(0, 1).contiguous()
