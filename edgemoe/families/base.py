"""The declaration of a model family: its config keys, tensor names, KV shape and the traits of its layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

from edgemoe.errors import ModelRefused
from edgemoe.kv.shape import KVShape, keys_and_values
from edgemoe.storage.convert.checkpoint import Config

_NEVER_USED = (
    r".*\.rotary_emb\.inv_freq",
    r".*\.(?:[qkv]|kv|attn|prob|p|input|output|activation)_(?:scale|zero_point)",
)
"""Tensors that no model uses: rotary frequencies, which are computed from the config, and scales of quantized KV,
attention, inputs and outputs, which edgemoe does not quantize so.
"""


@dataclass(frozen=True)
class Gate:
    """How a router makes gate weights of its logits.

    Args:
        normalise: transformers' config -> whether the chosen experts' gate weights have the same sum for every token.
        rounded: whether gate weights are rounded to bf16; the compiled kernel does it.
        function: "softmax" or "sigmoid", of the logits; a bias for the choice alone is added behind it.
    """

    normalise: Callable[[Any], bool] = attrgetter("norm_topk_prob")
    rounded: bool = True
    function: str = "softmax"


@dataclass(frozen=True)
class FusedGQA:
    """Traits of a family whose decoder layers are norm, attention, residual, norm, experts, residual.

    Its attention is plain grouped-query attention with rotated halves: q_proj, k_proj, v_proj, o_proj, perhaps q_norm
    and k_norm. layers.fused_decode runs one new token through such layers in one call; in other steps layers.gqa
    computes the attention.

    Args:
        windows: transformers' config -> number of latest tokens that each layer attends to; 0: all.
        block_is_experts: whether a MoE block has a router and experts only.
    """

    windows: Callable[[Any], list[int]]
    block_is_experts: bool = True


@dataclass(frozen=True)
class Family:
    """One `model_type`. Implements storage's ExpertNames.

    Templates of tensor names have {layer} and {expert} in place of numbers.

    Args:
        model_type: as in config.json.
        experts_keys: config keys for the number of experts of a layer, of which a config has one or more.
        intermediate_key: config key for an expert's inner size I.
        moe_layers: config -> the layers that have experts, ascending.
        expert_names: templates of one expert's gate [I, H], up [I, H] and down [H, I]; None: only fused tensors exist.
        fused_names: templates of all experts' [E, 2I, H] and [E, H, I], a pair for each naming.
        fused_checkpoints: whether checkpoints of the Hub have the first of fused_names, not expert_names.
        quantized_as: the family without multipliers in whose form engines load the model with quantized experts
            (storage/export/multipliers.py); None: its own.
        router_names: templates of a layer's router weight [E, H].
        top_k_key: config key for the number of experts that a token is routed to.
        transposed: whether the fused tensors are [E, H, 2I] and [E, I, H].
        renames: (part of a dense tensor's name, its name in transformers' modules), applied in this order.
        precise: templates of dense tensors that stay float32.
        unused: regular expressions of tensors that are not part of the model.
        predicts_ahead: whether layers for multi-token prediction follow the model's layers.
        kv: config -> shape of a sequence's KV.
        product_router: whether a router's experts are the top k of its weight times the hidden state; biases, groups
            and corrections make others.
        rms_norm: whether modules named *RMSNorm compute weight * x / sqrt(mean(x^2) + epsilon).
        gate: the gate of its routers; None: they choose in a way of their own, which Lynx cannot change.
        fused_gqa: traits of decoder layers that the compiled kernel can run; None: it cannot.
    """

    model_type: str
    experts_keys: tuple[str, ...]
    intermediate_key: str
    moe_layers: Callable[[Config], tuple[int, ...]]
    expert_names: tuple[str, str, str] | None
    fused_names: tuple[tuple[str, str], ...]
    router_names: tuple[str, ...]
    fused_checkpoints: bool = False
    quantized_as: Family | None = None
    top_k_key: str = "num_experts_per_tok"
    transposed: bool = False
    renames: tuple[tuple[str, str], ...] = ()
    precise: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    predicts_ahead: bool = False
    kv: Callable[[Config], KVShape] = keys_and_values
    product_router: bool = True
    rms_norm: bool = True
    gate: Gate | None = Gate()
    fused_gqa: FusedGQA | None = None

    def experts(self, config: Config) -> int:
        """Returns the number of experts of each layer in moe_layers.

        Raises:
            ModelRefused: the config has none of the keys, or two with different values.
        """
        found = {key: config[key] for key in self.experts_keys if config.get(key) is not None}
        if len(set(found.values())) != 1:
            raise ModelRefused(
                f"one number of experts in config.json, as {' or '.join(self.experts_keys)}",
                " and ".join(f"{key} {value}" for key, value in found.items()) or "none of these keys",
                "check that config.json belongs to this checkpoint",
            )
        return int(next(iter(found.values())))

    def intermediate(self, config: Config) -> int:
        """Returns an expert's inner size I."""
        return int(config[self.intermediate_key])

    def separate(self, layer: int, expert: int) -> tuple[str, str, str] | None:
        """Names an expert's tensors: gate, up, down. Returns None where only fused tensors exist."""
        if self.expert_names is None:
            return None
        gate, up, down = (name.format(layer=layer, expert=expert) for name in self.expert_names)
        return gate, up, down

    def fused(self, layer: int) -> tuple[tuple[str, str], ...]:
        """Names the tensors of all experts: a pair (gate and up, down) for each naming."""
        return tuple((up.format(layer=layer), down.format(layer=layer)) for up, down in self.fused_names)

    def router(self, layer: int) -> str:
        """Names a layer's router weight in checkpoints of the Hub."""
        return self.router_names[0].format(layer=layer)

    def is_expert(self, name: str) -> bool:
        """Whether a tensor of this name has expert weights, of any layer and expert."""
        templates = (*(self.expert_names or ()), *(name for pair in self.fused_names for name in pair))
        return any(_pattern(template).fullmatch(name) for template in templates)

    def is_router(self, name: str) -> bool:
        """Whether a tensor of this name is a router's weight."""
        return any(_pattern(template).fullmatch(name) for template in self.router_names)

    def keeps_precision(self, name: str) -> bool:
        """Whether a dense tensor of this name stays float32, because transformers computes with it in float32."""
        return any(_pattern(template).fullmatch(name) for template in self.precise)

    def is_unused(self, name: str, config: Config) -> bool:
        """Whether a tensor of this name is not part of the model; transformers does not load it either."""
        if any(re.fullmatch(pattern, name) for pattern in (*_NEVER_USED, *self.unused)):
            return True
        layer = re.match(r"model\.layers\.([0-9]{1,6})\.", name)
        if layer is None or not self.predicts_ahead:
            return False
        first, more = config["num_hidden_layers"], config.get("num_nextn_predict_layers") or 1
        return bool(first <= int(layer[1]) < first + more)

    def in_modules(self, name: str) -> str:
        """Returns the name in transformers' modules of a checkpoint's dense tensor."""
        for part, renamed in self.renames:
            name = name.replace(part, renamed)
        return name

    def in_checkpoint(self, name: str) -> str:
        """Returns the name in checkpoints of the Hub of a dense tensor, whose name may be that of the modules."""
        if self.in_modules(name) == name:
            for part, renamed in reversed(self.renames):
                name = name.replace(renamed, part)
        return name


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{layer\}", r"\d+").replace(r"\{expert\}", r"\d+"))
