"""A model family: traits of its layers that are declared, and sizes and names that are derived from transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from operator import attrgetter
from typing import Any

from edgemoe.kv.shape import KVShape
from edgemoe.storage.store.manifest import SCALE_SUFFIX

_NEVER_USED = (
    r"(?:.*\.)?rotary_emb\.inv_freq",
    r".*\.(?:[qkv]|kv|attn|prob|p|input|output|activation)_(?:scale|zero_point)",
)
"""Tensors that no model uses: rotary frequencies, which are computed from the config, and scales of quantized KV,
attention, inputs and outputs, which edgemoe does not quantize so.
"""


OTHER_PROGRAM = "run it with another program, such as llama.cpp, ollama or vLLM"
"""Action of errors about dense models."""

SAME_MODULES = {"kimi_k2": "deepseek_v3"}
"""model_type of checkpoints that bring code of their own -> the one of transformers that computes the same."""


@dataclass(frozen=True)
class Gate:
    """How a router makes gate weights of its logits.

    Args:
        normalise: transformers' config -> whether the chosen experts' gate weights have the same sum for every token.
        rounded: whether gate weights are rounded to bf16; the compiled kernel does it.
        function: "softmax" or "sigmoid", of the logits; a bias for the choice alone is added to its result.
        remaps: whether the tokens of a step may agree on experts: gate weights are in proportion to the scores.
    """

    normalise: Callable[[Any], bool] = attrgetter("norm_topk_prob")
    rounded: bool = True
    function: str = "softmax"
    remaps: bool = True


@dataclass(frozen=True)
class FusedGQA:
    """Traits of a family whose decoder layers are norm, attention, residual, norm, experts, residual, or a half of it.

    Its attention is plain grouped-query attention with rotated halves or neighbours: q_proj, k_proj, v_proj, o_proj,
    perhaps q_norm and k_norm, perhaps a gate in q_proj; or multi-head latent attention. In its place some layers may
    have a gated delta net, a short convolution, a selective state space or Kimi Delta Attention. layers.fused_decode
    runs one new token through such layers in one call; in other steps layers.gqa, layers.latent_attention,
    layers.delta_net, layers.short_convolution, layers.state_space and layers.recurrences compute these parts.

    Args:
        windows: transformers' config -> number of latest tokens that each layer attends to; 0: all.
        block_is_experts: whether a MoE block has a router and experts only.
        rotates: transformers' config -> whether each layer rotates its queries and keys by position; None: every one
            does, where the model has a rotary embedding.
    """

    windows: Callable[[Any], list[int]]
    block_is_experts: bool = True
    rotates: Callable[[Any], list[bool]] | None = None


@dataclass(frozen=True)
class QuantizedForm:
    """The family without multipliers in whose form engines load quantized experts (storage/export/multipliers.py).

    Args:
        model_type: the value of `model_type` in config.json, such as qwen3_moe.
        expert_names: templates of one expert's gate, up and down.
        router_name: template of a layer's router weight.
    """

    model_type: str
    expert_names: tuple[str, str, str]
    router_name: str


@dataclass(frozen=True)
class Traits:
    """Properties of a `model_type` that cannot be derived from transformers' modules.

    The defaults are true of every family: its routers choose for themselves.

    Args:
        models: the models that people know, for documents and messages.
        fused_gqa: traits of its decoder layers, which the compiled kernel runs.
        expert_names: templates of tensors that some checkpoints have and transformers does not know: one expert's gate
            [I, H], up [I, H] and down [H, I].
        quantized_as: the form in which engines load the model with quantized experts; None: its own.
        product_router: whether a router's experts are the top k of its weight times the hidden state; biases, groups
            and corrections make others.
        rms_norm: whether modules named *RMSNorm compute weight * x / sqrt(mean(x^2) + epsilon), or that with 1 + weight
            as the weight, and modules named *LayerNorm the same of x minus its mean, plus a bias.
        head: how checkpoints name the tensors of a head for further tokens, one of HEAD_FORMS; "": they have none, or
            no test has shown yet that this program computes it.
        gate: the gate of its routers; None: they choose in a way of their own, which Lynx cannot change, though the
            compiled kernel may know it.
    """

    models: str
    fused_gqa: FusedGQA
    expert_names: tuple[str, str, str] | None = None
    quantized_as: QuantizedForm | None = None
    product_router: bool = False
    rms_norm: bool = False
    gate: Gate | None = None
    head: str = ""


HEAD_FORMS = ("layer", "mtp")
"""Names of tensors of a head: as one more layer of the model (DeepSeek-V3, GLM-4.5), or as a module `mtp` (Qwen)."""

_ROWS = re.compile(r"(^|\.)(\w*embed\w*|lm_head|kv_b_proj|weights_proj)\.weight$")
"""Matrices of at least 8 bits: embeddings and heads, whose 4 bits cost more than all others together
(docs/decisions/0058), each head's matrices of latent attention, and an indexer's weights of heads, which are converted.
"""

_OUTER = re.compile(r"(model\.(embed_tokens|embeddings)|lm_head)\.weight")
"""The weights of embedding and head in transformers' modules."""

Rename = tuple[str, str]
"""A regular expression, and what stands for its first match; `\\1` is the match's first group."""


@dataclass(frozen=True)
class Family:
    """The sizes and tensor names of one model. Implements storage's ExportNames.

    families.derive makes it from transformers' modules. Templates of tensor names have {layer} and {expert} in place of
    numbers.

    Args:
        model_type: the value of `model_type` in transformers' config, such as qwen3_moe.
        traits: the declared properties of the model_type.
        moe_layers: the layers that have experts, ascending.
        experts: number of experts of each of them.
        hidden: size H of a hidden state.
        intermediate: an expert's inner size I.
        top_k: experts that a token is routed to.
        kv: shape of a sequence's KV.
        expert_names: templates of one expert's gate [I, H], up [I, H] and down [H, I], of up and down alone where
            experts have no gate; None: only fused tensors exist.
        fused_names: templates of all experts' [E, 2I, H], or [E, I, H] without a gate, and [E, H, I], a pair for each
            naming.
        fused_checkpoints: whether checkpoints of the Hub have the first of fused_names, not expert_names.
        transposed: whether the fused tensors are [E, H, 2I] and [E, I, H].
        either_way: whether transposed ones may also be [E, 2I, H] and [E, H, I], which their shapes show.
        router_name: template of a layer's router weight in transformers' modules.
        gated: whether experts have a gate.
        renames: make a dense tensor's name in transformers' modules of its name in a checkpoint.
        restores: make the name in checkpoints of the Hub of the name in transformers' modules.
        precise: regular expressions found in the names, in modules, of tensors that stay float32.
        unused: regular expressions found in the names of tensors that are not part of the model.
        joins: endings of names in modules: of a dense tensor, and of its parts in checkpoints, in the order of their
            rows.
        ahead: first and last + 1 of the layers for multi-token prediction, which follow the model's layers.
        dense: names in modules of all dense tensors.
    """

    model_type: str
    traits: Traits
    moe_layers: tuple[int, ...]
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    kv: KVShape
    expert_names: tuple[str, ...] | None
    fused_names: tuple[tuple[str, str], ...]
    fused_checkpoints: bool
    transposed: bool
    either_way: bool
    router_name: str
    gated: bool = True
    renames: tuple[Rename, ...] = ()
    restores: tuple[Rename, ...] = ()
    precise: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    joins: tuple[tuple[str, tuple[str, ...]], ...] = ()
    ahead: tuple[int, int] = (0, 0)
    dense: frozenset[str] = field(default=frozenset(), repr=False)

    def separate(self, layer: int, expert: int) -> tuple[str, ...] | None:
        """Names an expert's tensors: gate, if it has one, up, down. Returns None where only fused tensors exist."""
        if self.expert_names is None:
            return None
        return tuple(name.format(layer=layer, expert=expert) for name in self.expert_names)

    def fused(self, layer: int) -> tuple[tuple[str, str], ...]:
        """Names the tensors of all experts: a pair (gate and up, down) for each naming."""
        return tuple((up.format(layer=layer), down.format(layer=layer)) for up, down in self.fused_names)

    def router(self, layer: int) -> str:
        """Names a layer's router weight in checkpoints of the Hub."""
        return self.in_checkpoint(self.router_name.format(layer=layer))

    def is_expert(self, name: str) -> bool:
        """Whether a tensor of this name has expert weights, of any layer and expert."""
        templates = (*(self.expert_names or ()), *(name for pair in self.fused_names for name in pair))
        return any(_pattern(template).fullmatch(name) for template in templates)

    def is_router(self, name: str) -> bool:
        """Whether a tensor of this name is a router's weight."""
        return _pattern(self.router_name).fullmatch(self.in_modules(name)) is not None

    def is_outer(self, name: str) -> bool:
        """Whether a dense matrix of this name is the weight of the embedding or the head."""
        return _OUTER.fullmatch(self.in_modules(name)) is not None

    def keeps_rows(self, name: str) -> bool:
        """Whether a dense matrix of this name has at least 8 bits."""
        return _ROWS.search(self.in_modules(name)) is not None

    def keeps_precision(self, name: str) -> bool:
        """Whether a dense tensor of this name stays float32, because transformers computes with it in float32."""
        return any(re.search(pattern, self.in_modules(name)) for pattern in self.precise)

    def is_unused(self, name: str) -> bool:
        """Whether a tensor of this name is not part of the model; transformers does not load it either."""
        if self.never_used(name):
            return True
        renamed = self.in_modules(name)
        if renamed in self.dense:
            return False
        if any(re.search(pattern, each) for pattern in self.unused for each in (name, renamed)):
            return True
        layer = re.match(r"model\.layers\.([0-9]{1,6})\.", renamed)
        return layer is not None and self.ahead[0] <= int(layer[1]) < self.ahead[1]

    @staticmethod
    def never_used(name: str) -> bool:
        """Whether no model uses a tensor of this name."""
        return any(re.fullmatch(pattern, name) for pattern in _NEVER_USED)

    def in_modules(self, name: str) -> str:
        """Returns the name in transformers' modules of a checkpoint's dense tensor, or of a tensor's scales."""
        stem = name.removesuffix(SCALE_SUFFIX)
        return renamed(stem, self.renames) + name[len(stem) :]

    def in_whole(self, name: str) -> str:
        """Returns the name in transformers' modules of the tensor that has a checkpoint's dense tensor, or is it."""
        own = self.in_modules(name)
        for whole, parts in self.joins:
            for part in parts:
                if own.endswith(part):
                    return own.removesuffix(part) + whole
        return own

    def in_checkpoint(self, name: str) -> str:
        """Returns the name in checkpoints of the Hub of a dense tensor, whose name may be the modules' own."""
        own = self.in_modules(name)
        restored = renamed(own, self.restores)
        return restored if self.in_modules(restored) == own else own

    @cached_property
    def quantized_as(self) -> Family | None:
        """The model in the form in which engines load quantized experts; None: this one."""
        form = self.traits.quantized_as
        if form is None:
            return None
        return replace(
            self,
            model_type=form.model_type,
            expert_names=form.expert_names,
            fused_checkpoints=False,
            router_name=form.router_name,
            renames=(),
            restores=(),
        )


def renamed(name: str, renames: Iterable[Rename]) -> str:
    """Applies renames in their order, each at most once."""
    for pattern, replacement in renames:
        name = _compiled(pattern).sub(replacement, name, count=1)
    return name


_compiled = cache(re.compile)


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{layer\}", r"\d+").replace(r"\{expert\}", r"\d+"))
