"""A checkpoint and stores of every family, with prompts and transformers' logits for them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from family_models import SEPARATE, VOCABULARY, blocks_of, load, random_model, router_of, save
from torch import nn

from edgemoe.models.conversion.run import convert_checkpoint

LENGTH = 8
PROMPTS = 3

NOISE = 0.03
"""Relative noise on a router's input, several times what rounding makes, that may not change its choice."""

STEADY = 0.1
"""Largest difference that such noise may make to a weight of a router; a router can have steps there too."""


@dataclass(frozen=True)
class Case:
    """One family.

    Args:
        checkpoints: form -> checkpoint. "separate" has one tensor per expert's matrix, where the family has that form;
            "fused" has one tensor per layer for all experts.
    """

    checkpoints: dict[str, Path]

    @classmethod
    def made(cls, model_type: str, directory: Path) -> Case:
        """Saves a family's model in a directory."""
        made = random_model(model_type)
        forms = {"separate": False, "fused": True} if model_type in SEPARATE else {"fused": False}
        return cls({form: save(made, directory / form, fused=fused) for form, fused in forms.items()})

    @cached_property
    def model(self) -> Any:
        """transformers' own of the checkpoint."""
        return load(self.checkpoints["fused"])

    @cached_property
    def prompts(self) -> list[list[int]]:
        """[PROMPTS][LENGTH]."""
        return decided_prompts(self.model).tolist()

    @cached_property
    def logits(self) -> torch.Tensor:
        """The model's, float32 [PROMPTS, LENGTH, vocabulary]."""
        with torch.no_grad():
            return self.model(torch.tensor(self.prompts)).logits.float()

    def store(self, form: str = "fused", dense_bits: int = 16) -> Path:
        """Converts the checkpoint once; returns the store."""
        source = self.checkpoints[form]
        store = source.with_name(f"{form}-{dense_bits}")
        if not store.exists():
            convert_checkpoint(source, store, max_level=8, layout="auto", dense_bits=dense_bits)
        return store


def decided_prompts(model: nn.Module) -> torch.Tensor:
    """Prompts of random tokens, int64 [PROMPTS, LENGTH], whose experts stay the same under noise.

    A router of random weights often has two experts so close that rounding chooses between them. Such a token proves
    nothing about either side, so prompts with one are left out.
    """
    generator = torch.Generator().manual_seed(1)
    found = torch.empty(0, LENGTH, dtype=torch.int64)
    while len(found) < PROMPTS:
        drawn = torch.randint(3, VOCABULARY, (200, LENGTH), generator=generator)
        for _ in range(6):
            if not len(drawn):
                break
            experts, weights = routed_experts(model, drawn, 0.0, generator)
            others, changed = routed_experts(model, drawn, NOISE, generator)
            alike = (others == experts) & ((changed - weights).abs() < STEADY * weights.max())
            drawn = drawn[alike.flatten(1).all(1)]
        found = torch.cat((found, drawn))
    return found[:PROMPTS]


def routed_experts(
    model: nn.Module, ids: torch.Tensor, noise: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token's experts, ascending, and their weights, [prompts, LENGTH, layers, k]; `noise` on routers' input."""
    experts: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []

    def disturb(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (hidden,) = inputs
        return (hidden * (1 + noise * torch.randn(hidden.shape, generator=generator)).to(hidden.dtype),)

    def keep(module: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        found = output[2].view(*ids.shape, -1).sort(-1)
        experts.append(found.values)
        weights.append(output[1].view(*ids.shape, -1).float().gather(-1, found.indices))

    with ExitStack() as stack:
        for block in blocks_of(model):
            stack.callback(router_of(block).register_forward_pre_hook(disturb).remove)
            stack.callback(router_of(block).register_forward_hook(keep).remove)
        with torch.no_grad():
            model(ids)
    return torch.stack(experts, dim=2), torch.stack(weights, dim=2)
