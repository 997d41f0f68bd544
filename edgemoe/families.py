"""Model families: what each calls its experts. A new family is a row of the table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from storage.checkpoint import Config
from storage.errors import ModelRefused


@dataclass(frozen=True)
class Family:
    """One row: config keys and name templates of a `model_type`. Implements storage's ExpertNames.

    Args:
        model_type: as in config.json.
        experts_keys: config keys for the experts of a layer; releases of transformers differ, one is enough.
        top_k_key: config key for the experts that a token is routed to.
        intermediate_key: config key for an expert's inner size I.
        sparse_layers: config -> the layers that have experts, ascending.
        gate, up: template of one expert's [I, H], with {layer} and {expert}.
        down: template of one expert's [H, I].
        fused_gate_up: template of all experts' [E, 2I, H], gate first, with {layer}.
        fused_down: template of all experts' [E, H, I].
        router: template of a layer's router weight [E, H].
    """

    model_type: str
    experts_keys: tuple[str, ...]
    top_k_key: str
    intermediate_key: str
    sparse_layers: Callable[[Config], tuple[int, ...]]
    gate: str
    up: str
    down: str
    fused_gate_up: str
    fused_down: str
    router: str

    def moe_layers(self, config: Config) -> tuple[int, ...]:
        """The layers that have experts, ascending."""
        return self.sparse_layers(config)

    def experts(self, config: Config) -> int:
        """Experts in each of them.

        Raises:
            ModelRefused: the config has none of the keys, or two that disagree.
        """
        found = {key: config[key] for key in self.experts_keys if config.get(key) is not None}
        if len(set(found.values())) != 1:
            raise ModelRefused(
                f"the number of experts was wanted in config.json, as {' or '.join(self.experts_keys)}",
                f"it has {found or 'neither'}",
                "Check that config.json belongs to this checkpoint",
            )
        return int(next(iter(found.values())))

    def intermediate(self, config: Config) -> int:
        """An expert's inner size I."""
        return int(config[self.intermediate_key])

    def separate(self, layer: int, expert: int) -> tuple[str, str, str]:
        """One expert's tensors: gate, up, down."""
        return (
            self.gate.format(layer=layer, expert=expert),
            self.up.format(layer=layer, expert=expert),
            self.down.format(layer=layer, expert=expert),
        )

    def fused(self, layer: int) -> tuple[str, str]:
        """All experts' tensors: gate and up, down."""
        return self.fused_gate_up.format(layer=layer), self.fused_down.format(layer=layer)

    def is_expert(self, name: str) -> bool:
        """Whether a tensor of this name holds expert weights, of any layer and expert."""
        templates = (self.gate, self.up, self.down, self.fused_gate_up, self.fused_down)
        return any(_matches(template, name) for template in templates)

    def is_router(self, name: str) -> bool:
        """Whether a tensor of this name is a router's weight."""
        return _matches(self.router, name)


def _matches(template: str, name: str) -> bool:
    return _pattern(template).fullmatch(name) is not None


@cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{layer\}", r"\d+").replace(r"\{expert\}", r"\d+"))


def _every_sparse_step(config: Config) -> tuple[int, ...]:
    """Every decoder_sparse_step-th layer, except those named in mlp_only_layers."""
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelRefused(
            "a list of layers was wanted for mlp_only_layers in config.json",
            f"it is a {type(dense).__name__}",
            "Check where this checkpoint is from",
        )
    step = config.get("decoder_sparse_step") or 1
    return tuple(i for i in range(config["num_hidden_layers"]) if (i + 1) % step == 0 and i not in dense)


FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            model_type="qwen3_moe",
            experts_keys=("num_experts", "num_local_experts"),
            top_k_key="num_experts_per_tok",
            intermediate_key="moe_intermediate_size",
            sparse_layers=_every_sparse_step,
            gate="model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
            up="model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
            down="model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
            fused_gate_up="model.layers.{layer}.mlp.experts.gate_up_proj",
            fused_down="model.layers.{layer}.mlp.experts.down_proj",
            router="model.layers.{layer}.mlp.gate.weight",
        ),
    )
}


def family_of(config: Config) -> Family:
    """The family of a bounded config.

    Raises:
        ModelRefused: the model type is not in the table, or a key that its family needs is not in the config.
    """
    family = FAMILIES.get(config["model_type"])
    if family is None:
        raise ModelRefused(
            f"a supported model family was wanted for model_type {config['model_type']!r}",
            f"edgemoe knows {', '.join(sorted(FAMILIES))}",
            "Choose a model of one of these families",
        )
    family.experts(config)
    for key in (family.top_k_key, family.intermediate_key):
        if config.get(key) is None:
            raise ModelRefused(
                f"{key} was wanted in config.json, for model_type {family.model_type}",
                "it is not there",
                "Check that config.json belongs to this checkpoint",
            )
    return family
