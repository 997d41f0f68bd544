"""Selective state spaces (Mamba-2): convolution, recurrence and gated norm in one call of csrc/state_space.c."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
import torch.nn.functional as F

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.delta_net import DeltaState
from edgemoe.kernels.native.functions import values_of, wide_values_of
from edgemoe.kernels.native.structures import Convolution, StateSpace


class SpaceSizes(NamedTuple):
    """Sizes of a state space.

    Attributes:
        groups: groups of heads that share keys and queries.
        heads: a multiple of `groups`.
        key_dim, value_dim: sizes of a key and of a value; what a module calls B, C and x are keys, queries and values.
    """

    groups: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def values(self) -> int:
        """Numbers of all heads' values."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: all values, keys and queries."""
        return self.values + 2 * self.groups * self.key_dim


class SpaceWeights(NamedTuple):
    """Weights of a state space but its projections.

    Attributes:
        conv: [channels, taps], the oldest input's first.
        bias: [channels], of the convolution; None: there is none.
        added: [heads], added to the numbers of steps.
        limits: the least and the largest step.
        factor: [heads], a head's state keeps e^(factor step) of itself.
        skip: [heads], the part of a value that is added to its result.
        norm: [values], weight of the results' norm.
        norm_size: numbers that are normed together.
        epsilon: is added to the mean of squares in the norm.
    """

    conv: torch.Tensor
    bias: torch.Tensor | None
    added: torch.Tensor
    limits: tuple[float, float]
    factor: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor
    norm_size: int
    epsilon: float


class NativeStateSpace:
    """The part of a state space between its projections.

    Attributes:
        reads: numbers of a token's row: z [values] of the results' gate, inputs of the convolution, and a number
            [heads] of each head's step.
        writes: numbers of a token's results.

    Raises:
        ValueError: sizes that differ.
    """

    def __init__(self, sizes: SpaceSizes, weights: SpaceWeights) -> None:
        _check(sizes, weights)
        self.sizes, (channels, self._taps) = sizes, weights.conv.shape
        self.reads, self.writes = sizes.values + channels + sizes.heads, sizes.values
        floats = {
            name: each.detach().float().contiguous()
            for name, each in (("factor", weights.factor), ("skip", weights.skip), ("norm", weights.norm))
        }
        conv, added = (
            weights.conv.detach().float().t().contiguous(),
            weights.added.detach().bfloat16().contiguous(),
        )
        bias = None if weights.bias is None else weights.bias.detach().float().contiguous()
        silu, softplus, wide_silu = values_of(F.silu), values_of(F.softplus), wide_values_of(F.silu)
        self._kept = floats, conv, added, bias, silu, softplus, wide_silu  # keeps the addresses valid
        self._structure = StateSpace(
            **sizes._asdict(),
            conv=Convolution(
                taps=self._taps,
                channels=channels,
                weights=conv.data_ptr(),
                bias=None if bias is None else bias.data_ptr(),
                silu=silu.data_ptr(),
            ),
            added=added.data_ptr(),
            softplus=softplus.data_ptr(),
            least=weights.limits[0],
            most=weights.limits[1],
            norm_size=weights.norm_size,
            epsilon=weights.epsilon,
            wide_silu=wide_silu.data_ptr(),
            **{name: each.data_ptr() for name, each in floats.items()},
        )

    @property
    def address(self) -> int:
        """The address of its structure; valid as long as this object."""
        return ctypes.addressof(self._structure)

    def __call__(self, projected: torch.Tensor, state: DeltaState) -> torch.Tensor:
        """Computes consecutive tokens of one sequence; a token's bits do not depend on how many a call has.

        Args:
            projected: bf16 [T, reads], contiguous.
            state: the sequence's states before the tokens, and the memory that its states after them are written to;
                states of the recurrence are [heads, key_dim, value_dim].

        Returns:
            bf16 [T, writes].

        Raises:
            MemoryError: no memory for the call.
            ValueError: sizes of the arguments differ.
        """
        sizes = self.sizes
        want = (sizes.channels, self._taps), (sizes.heads, sizes.key_dim, sizes.value_dim)
        given = state.shapes
        if projected.shape[1:] != (self.reads,) or not projected.is_contiguous() or given != {want}:
            raise ValueError(f"expected rows of {self.reads} and states of {want}, got {given}")
        out = projected.new_empty(len(projected), self.writes)
        run = state.run(len(projected))
        result = native.library().edgemoe_state_space(
            *(native.threads(), self.address, projected.data_ptr(), 1),
            *(ctypes.byref(run), out.data_ptr()),
        )
        if result:
            raise native.failure(result, "a state space")
        return out


def _check(sizes: SpaceSizes, weights: SpaceWeights) -> None:
    """Raises ValueError for weights that do not have the sizes."""
    channels = weights.conv.shape[0]
    by_head = {each.shape for each in (weights.added, weights.factor, weights.skip)}
    whole = sizes.heads % sizes.groups == 0 == sizes.values % weights.norm_size
    if channels != sizes.channels or by_head != {(sizes.heads,)} or not whole:
        raise ValueError(
            f"expected {sizes.channels} channels and numbers of {sizes.heads} heads, got {channels}"
        )
    if weights.norm.shape != (sizes.values,) or (weights.bias is not None and len(weights.bias) != channels):
        raise ValueError(f"expected a norm of {sizes.values}, got {list(weights.norm.shape)}")
