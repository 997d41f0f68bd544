"""Damage of made-up experts, and random gate weights for it."""

from __future__ import annotations

import torch

from edgemoe.policy.damage import Damage
from edgemoe.storage.base import LEVELS


def random_gates(
    slots: int, seed: int, tokens: int = 30, experts: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices and gate weights [tokens, slots], falling as a router gives them, of every concentration, some tied."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = torch.rand(tokens, 1, generator=generator) * 8
    gates = torch.randn(tokens, slots, generator=generator).mul(sharpness).softmax(-1)
    gates[::7] = gates[::7].bfloat16().float()
    gates[::11] = 1 / slots
    chosen = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :slots]
    return chosen, gates.sort(descending=True).values


def a_damage(layers: int, experts: int, slots: int = 4, *, seed: int = 0, tokens: int = 300) -> Damage:
    """Errors that fall with the level about as measured ones do, and a sample of gate weights."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(layers, experts, 1, generator=generator) * 3 + 0.2
    table = size * torch.tensor([1.6e-5, 5e-3, 0.08, 1.0])
    table *= torch.rand(layers, experts, len(LEVELS), generator=generator) + 0.5
    samples = [random_gates(slots, seed * 100 + layer, tokens, experts) for layer in range(layers)]
    chosen, gates = (torch.stack(each) for each in zip(*samples, strict=True))
    return Damage("a test", tuple(range(layers)), table, chosen, gates)
