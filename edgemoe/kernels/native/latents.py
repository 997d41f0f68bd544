"""The parts of multi-head latent attention around its sums over tokens (csrc/latents.c)."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from edgemoe.kernels.native.structures import LatentAttention

HALVES, PAIRS, WIDE_PAIRS = range(3)
"""Pairs of numbers of a rotary part that are rotated together (csrc/latents.h)."""


class HeadMatrices(NamedTuple):
    """Each head's matrices.

    Attributes:
        keys: bf16 or int8 [heads, latent, key], one head's contiguous.
        values: [heads, value, latent], the same.
        scale: bf16 [heads, key + value], of the columns of int8 keys and the rows of int8 values; None: both are bf16.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scale: torch.Tensor | None


class NativeLatents:
    """Turns queries into the form of stored keys, stores keys, and makes values of sums.

    Args:
        matrices: the matrices of every head.
        rotary: numbers of a query and of a key that are rotated.
        norm: weight [latent], as kernels.program.Norm has it, and epsilon of the latents' norm.
        pairing: HALVES, PAIRS or WIDE_PAIRS.

    Attributes:
        heads: number of heads.
        stored: numbers of a stored key.
        queries: numbers of a token's queries.
        values: numbers of a token's result.
    """

    def __init__(
        self, matrices: HeadMatrices, rotary: int, norm: tuple[torch.Tensor, float], pairing: int
    ) -> None:
        self._kept = matrices, norm[0]  # keeps the addresses below valid
        keys, values, scale = matrices
        self.heads, latent, key = keys.shape
        value = values.shape[1]
        self.stored, self.queries, self.values = (
            latent + rotary,
            self.heads * (key + rotary),
            self.heads * value,
        )
        self._structure = LatentAttention(
            heads=self.heads,
            key=key,
            value=value,
            latent=latent,
            rotary=rotary,
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            key_scale=None if scale is None else scale.data_ptr(),
            value_scale=None if scale is None else scale[:, key:].data_ptr(),
            stride=keys.stride(0),
            scale_stride=key + value,
            norm=norm[0].data_ptr(),
            epsilon=norm[1],
            wide_norm=norm[0].dtype == torch.float32,
            pairing=pairing,
        )

    @property
    def address(self) -> int:
        """The address of its structure; valid as long as this object."""
        return ctypes.addressof(self._structure)
