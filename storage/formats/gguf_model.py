"""A GGUF file as a model: its config and tensors by transformers' keys and names."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edgemoe.errors import MissingTensor, ModelRefused
from edgemoe.storage.convert.gguf_parts import part_names, read_parts
from edgemoe.storage.files.untrusted import shortened
from edgemoe.storage.formats.base import Weight
from edgemoe.storage.formats.ggml import GgmlWeight
from edgemoe.storage.formats.gguf_rope import own_fields, rope_scaling


@dataclass(frozen=True)
class Architecture:
    """transformers' names for a GGUF architecture.

    Args:
        fixed: config values that the architecture implies.
        keys: config key -> field, without the architecture's name in front.
        tensors: part of a tensor's name in a layer -> transformers' name in the layer.
        experts: part of the name of a tensor over all experts -> transformers' name with {expert}.
        paired_rows: tensor in which llama.cpp interleaves rows i and i + half of every head -> config key of heads.
        repeated_heads: tensors whose heads an export repeats until keys and values have as many as queries, because
            llama.cpp computes no others; the norm over all heads and the attention stay the same.
        own_head: whether llama.cpp wants the head of a tied model as a tensor.
    """

    fixed: dict[str, Any]
    keys: dict[str, str]
    tensors: dict[str, str]
    experts: dict[str, str]
    paired_rows: dict[str, str] = dataclasses.field(default_factory=dict)
    repeated_heads: tuple[str, ...] = ()
    own_head: bool = False


REALS = (
    "rms_norm_eps",
    "rope_theta",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
"""Config keys whose values are no sizes, but floating-point numbers."""

_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "num_experts_per_tok": "expert_used_count",
}
_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_NORMED = _TENSORS | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")}
_PAIRED_ROWS = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}

ARCHITECTURES = {
    "qwen3moe": Architecture(
        fixed={
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        keys=_KEYS
        | {
            "head_dim": "attention.key_length",
            "num_experts": "expert_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        tensors=_NORMED,
        experts=_EXPERTS,
    ),
    "olmoe": Architecture(
        fixed={
            "model_type": "olmoe",
            "architectures": ["OlmoeForCausalLM"],
            "norm_topk_prob": False,
            "clip_qkv": None,
        },
        keys=_KEYS | {"num_experts": "expert_count", "intermediate_size": "feed_forward_length"},
        tensors=_NORMED,
        experts=_EXPERTS,
        repeated_heads=("attn_k", "attn_v", "attn_k_norm"),
        own_head=True,
    ),
    "granitemoe": Architecture(
        fixed={"model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"]},
        keys=_KEYS
        | {
            "num_local_experts": "expert_count",
            "intermediate_size": "feed_forward_length",
            "embedding_multiplier": "embedding_scale",
            "attention_multiplier": "attention.scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        tensors=_TENSORS | {"ffn_gate_inp": "block_sparse_moe.router.layer"},
        experts={
            f"ffn_{part}_exps": f"block_sparse_moe.experts.{{expert}}.{part}_proj"
            for part in ("gate", "up", "down")
        },
        paired_rows=_PAIRED_ROWS,
    ),
    "llama": Architecture(
        fixed={"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "sliding_window": None},
        keys=_KEYS | {"num_local_experts": "expert_count", "intermediate_size": "feed_forward_length"},
        tensors=_TENSORS | {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts={
            f"ffn_{part}_exps": f"block_sparse_moe.experts.{{expert}}.{name}"
            for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
        paired_rows=_PAIRED_ROWS,
    ),
}
"""general.architecture -> its names in transformers."""

_GATE, _UP, _GATE_UP = "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"
"""Parts of the names of tensors over all experts; the last one has the rows of both others, gate first."""

OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TOKENS = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Fields with a token that ends an answer: of a text, of a turn, of a message."""


class GgufModel:
    """The config and tensors of a file.

    Attributes:
        path: the path of the file.
        header: the header of the file.
        config: the content of a config.json, before bounded_config.

    Raises:
        BadHeader, TruncatedFile: the header contradicts the file.
        ModelRefused: an unknown architecture, one file of several, or rotary embeddings of an unknown kind.
        MissingTensor: a field or tensor of the architecture is missing.
    """

    def __init__(self, path: Path) -> None:
        parts = read_parts(path)
        self.path, self.tensors = path.with_name(part_names(path.name)[0]), parts.tensors
        self.fields = fields = parts.header.fields
        name = fields.get("general.architecture")
        architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
        if architecture is None or fields.get(f"{name}.expert_count", 0) == 0:
            raise self._refused(
                f"an architecture with experts among {', '.join(ARCHITECTURES)}",
                f"{shortened(name)} with {shortened(fields.get(f'{name}.expert_count', 0))} experts",
                "choose a supported model, or its checkpoint as safetensors",
            )
        self._name, self._architecture = str(name), architecture
        self.config = self._config()

    def weights(self) -> dict[str, Weight]:
        """Returns every tensor by transformers' name; a tensor over all experts becomes one per expert."""
        out: dict[str, Weight] = {}
        for name in self.tensors:
            out |= self._named(name)
        return out

    def _config(self) -> dict[str, Any]:
        tensors, fields = self.tensors, self.fields
        if "token_embd.weight" not in tensors:
            raise MissingTensor(
                f"token_embd.weight in {self.path}", "no such tensor", "download the file again"
            )
        out = dict(self._architecture.fixed)
        own = own_fields(fields, self._name)
        for key, field in self._architecture.keys.items():
            if field not in own:
                raise MissingTensor(
                    f"the field {self._name}.{field} in {self.path}", "no such field", "choose another file"
                )
            out[key] = own[field]
        for key in out.keys() & set(REALS):  # bounded_config checks the sizes
            if type(out[key]) is not float or not 0 < out[key] < 1e12:
                raise self._refused(f"a number above 0 for {key}", shortened(out[key]), "choose another file")
        if (length := fields.get(f"{self._name}.attention.key_length")) is not None:
            out["head_dim"] = length
        if scaling := rope_scaling(own, self.path):
            out["rope_scaling"] = scaling
        out["vocab_size"] = tensors["token_embd.weight"][1].shape[0]
        out["tie_word_embeddings"] = "output.weight" not in tensors
        for key, field in _TOKENS.items():
            if type(value := fields.get(f"tokenizer.ggml.{field}")) is int:
                out[key] = value
        ends = [fields.get(f"tokenizer.ggml.{field}") for field in _ENDS]
        if known := list(dict.fromkeys(end for end in ends if type(end) is int)):
            out["eos_token_id"] = known[0] if len(known) == 1 else known
        return out | {"torch_dtype": "bfloat16"}

    def _named(self, name: str) -> dict[str, Weight]:
        (path, entry), known = self.tensors[name], self._architecture
        stem, _, suffix = name.rpartition(".")
        if suffix == "weight" and stem in OUTSIDE:
            return {f"{OUTSIDE[stem]}.weight": GgmlWeight(path, name, entry)}
        match = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,4})\.([\w.]+)\.weight", name, re.ASCII)
        part = match[2] if match else ""
        layer = f"model.layers.{match[1]}." if match else ""
        count = self.fields[f"{self._name}.expert_count"]
        if part in known.experts and entry.shape[:-2] == (count,):
            new = f"{layer}{known.experts[part]}.weight"
            return {new.format(expert=i): GgmlWeight(path, name, entry, i) for i in range(count)}
        if part == _GATE_UP and entry.shape[:-2] == (count,) and entry.shape[1] % 2 == 0:
            inner = entry.shape[1] // 2
            return {
                f"{layer}{known.experts[half]}.weight".format(expert=i): GgmlWeight(
                    path, name, entry, i, rows
                )
                for half, rows in ((_GATE, range(inner)), (_UP, range(inner, 2 * inner)))
                for i in range(count)
            }
        if (one := re.fullmatch(r"(ffn_(?:gate|up|down))\.(0|[1-9][0-9]{0,3})", part, re.ASCII)) and int(
            one[2]
        ) < count:
            new = f"{layer}{known.experts[f'{one[1]}_exps']}.weight"
            return {new.format(expert=int(one[2])): GgmlWeight(path, name, entry)}
        if part in known.tensors:
            weight: Weight = GgmlWeight(path, name, entry)
            if part in known.paired_rows:
                weight = UnpairedRows(weight, self.config[known.paired_rows[part]])
            return {f"{layer}{known.tensors[part]}.weight": weight}
        raise self._refused(
            f"only tensors of {self._name}",
            f"{shortened(name)} of shape {list(entry.shape)}",
            "choose a file of a supported model",
        )

    def _refused(self, wanted: str, found: str, action: str) -> ModelRefused:
        return ModelRefused(f"{wanted} in {self.path}", found, action)


class UnpairedRows(Weight):
    """A matrix [heads * D, K], each head's rows in transformers' order: the file's even rows, then its odd rows.

    Raises:
        ModelRefused: the number of rows is not a multiple of 2 * heads.
    """

    def __init__(self, weight: Weight, heads: object) -> None:
        if type(heads) is not int or heads < 1 or weight.shape[0] % (2 * heads):
            raise ModelRefused(
                f"rows of {shortened(heads)} heads in {weight.parts[0]}",
                f"{weight.shape[0]} rows",
                "choose another file",
            )
        self._weight, self._heads = weight, heads
        self.shape, self.parts, self.nbytes = weight.shape, weight.parts, weight.nbytes

    def read(self) -> torch.Tensor:
        """Reads the tensor in its shape as float32."""
        pairs = self._weight.read().view(self._heads, -1, 2, self.shape[1])
        return pairs.transpose(1, 2).reshape(self.shape)
