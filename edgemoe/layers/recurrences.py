"""Kimi Delta Attention: its products, one kernel call, and the product after it.

transformers computes a single token by the recurrence, and several by products of chunks, whose temporary memory grows
with a chunk. Here all of them go by the recurrence, so that rows have the same bits in a prompt, in chunks of it, and
as new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.delta_net import (
    MOST_KEY_DIM,
    DeltaForm,
    DeltaSizes,
    DeltaState,
    DeltaWeights,
    NativeDeltaNet,
)
from edgemoe.kernels.program import NORMED, DeltaNet, Linear, Operation, Place
from edgemoe.kv.linear_state import LayerState
from edgemoe.layers.dense import DenseLinear

_NEEDS = ("forget_gate", "b_proj", "o_norm")
"""Attributes of transformers' module."""


class ChannelDelta(nn.Module):
    """A delta rule with a decay for each number of a key, in RAM.

    Args:
        module: transformers' module, of which nothing is kept but its weights.
        gate, decays: the products that make a result's gate, and the decays, one after another.
    """

    def __init__(self, module: Any, gate: list[DenseLinear], decays: list[DenseLinear]) -> None:
        super().__init__()
        self.mixed = DenseLinear.joined((module.q_proj, module.k_proj, module.v_proj))
        self._chains = [self.mixed], gate, [module.b_proj], decays
        self.products = nn.ModuleList(linear for chain in self._chains for linear in chain)
        self.out: DenseLinear = module.o_proj
        self.native = _native_of(module, rounded_decay=len(decays) == 1)

    @classmethod
    def try_from(cls, module: Any) -> ChannelDelta | None:
        """Wraps a module in RAM that the compiled kernel supports; None for others, and without the kernel."""
        if not native.available() or not all(hasattr(module, name) for name in _NEEDS):
            return None
        gate = _products(module, ("g_a_proj", "g_b_proj"), ("g_proj",))
        decays = _products(module.forget_gate, ("f_a_proj", "f_b_proj"), ("f_proj",))
        others = [module.q_proj, module.k_proj, module.v_proj, module.b_proj, module.o_proj]
        linears = [*gate, *decays, *others]
        known = bool(gate and decays) and all(type(each) is DenseLinear for each in linears)
        known = known and all(each.bias is None for each in linears) and module.conv1d.bias is None
        known = known and module.activation == "silu" and module.o_norm.activation == "sigmoid"
        if not known or module.head_dim > MOST_KEY_DIM or module.o_proj.weight.device.type != "cpu":
            return None
        return cls(module, gate, decays)

    def operations(self) -> list[Operation]:
        """From the normed state to what the last product takes."""
        listed, at = list[Operation](), 0
        for number, chain in enumerate(self._chains):
            names = [NORMED, *(f"part {number}.{i}" for i in range(len(chain)))]
            listed += [
                Linear(source, target, linear.parts)
                for (source, target), linear in zip(pairwise(names), chain, strict=True)
            ]
            listed.append(Place(names[-1], "projected", at, self.native.reads))
            at += chain[-1].out_features
        return [*listed, DeltaNet("projected", "attended", self.native)]

    def forward(self, hidden_states: torch.Tensor, cache_params: LayerState) -> torch.Tensor:
        """Maps bf16 [1, R, H] to bf16 [1, R, H], and updates the state."""
        parts = []
        for chain in self._chains:
            part = hidden_states[0]
            for linear in chain:
                part = linear(part)
            parts.append(part)
        state = DeltaState.of(cache_params, self.native.reads)
        out: torch.Tensor = self.out(self.native(torch.cat(parts, dim=-1), state))
        return out[None]


def _products(module: Any, *chains: Sequence[str]) -> list[Any]:
    """The products of the first chain whose names a module has; none where it has no chain."""
    found = ([getattr(module, name, None) for name in chain] for chain in chains)
    return next((chain for chain in found if None not in chain), [])


def _native_of(module: Any, *, rounded_decay: bool) -> NativeDeltaNet:
    """The compiled form of what lies between the module's products."""
    forget, dim = module.forget_gate, module.head_dim
    heads = module.num_heads
    factor = -forget.A_log.data.float().exp().flatten()
    weights = DeltaWeights(
        module.conv1d.weight.data[:, 0],
        forget.dt_bias.data.flatten(),
        factor,
        module.o_norm.weight.data,
        module.o_norm.variance_epsilon,
    )
    lowest = float(forget.lower_bound) if getattr(forget, "safe_gate", False) else 0.0
    form = DeltaForm(dim, lowest, rounded_decay, strict=True, gate=torch.sigmoid)
    return NativeDeltaNet(DeltaSizes(heads, heads, dim, dim), weights, form)
