"""The function between experts' products where it is not silu(gate) up (csrc/experts/expert_ffn.c)."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from edgemoe.kernels.native import structures


class GateTables(NamedTuple):
    """An activation that is the product of a function of each gate and one of each up, or a function of each number.

    Attributes:
        gate, up: the functions' values for each bf16 number, in the order of their bits: bf16 [65536]; `up` is None
            where experts have no gate, and `gate` is the function of each number of the first product. A float32 gate
            is not rounded before the product with up.
        interleaved: whether gate and up alternate in the first product's result; otherwise all of gate come first.
    """

    gate: torch.Tensor
    up: torch.Tensor | None
    interleaved: bool


class NativeExpertActivation:
    """The activation and the biases of a layer's experts.

    Args:
        tables: the activation.
        biases: bf16 [experts, 2 I], or [experts, I] without a gate, and [experts, H], added to the products; None:
            there are none.
    """

    def __init__(self, tables: GateTables, biases: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        kept = [each.detach().bfloat16().contiguous() for each in biases or ()]
        self._kept = tables, kept  # keeps the addresses below valid
        self._structure = structures.ExpertActivation(
            gate=tables.gate.data_ptr(),
            up=None if tables.up is None else tables.up.data_ptr(),
            interleaved=tables.interleaved,
            wide_gate=tables.gate.dtype == torch.float32,
        )
        if kept:
            self._structure.up_bias, self._structure.down_bias = (each.data_ptr() for each in kept)

    @property
    def address(self) -> int:
        """The address of its structure; valid as long as this object."""
        return ctypes.addressof(self._structure)
