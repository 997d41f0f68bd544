"""Gated delta nets: convolution, recurrence and gated norm of a layer in one call of csrc/delta_net.c."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.functions import values_of, wide_values_of
from edgemoe.kernels.native.structures import DeltaNet, DeltaRun
from edgemoe.kv.linear_state import LayerState

MOST_KEY_DIM = 1024
"""Largest size of a key (csrc/delta_step.h)."""


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta net.

    Attributes:
        key_heads, heads: numbers of heads of keys, and of values: a multiple.
        key_dim, value_dim: sizes of a key and of a value, key_dim at most MOST_KEY_DIM.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Channels of the convolution: all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


class DeltaWeights(NamedTuple):
    """Weights of a gated delta net but its projections.

    Attributes:
        conv: [channels, taps], the oldest input's first.
        added: [heads * decays], added to `a` of a decay.
        factor: [heads], a head's state keeps e^(factor softplus(a + added)) of itself.
        norm: [value_dim], of the norm of results; where it is bf16 its product is rounded before the gate.
        epsilon: is added to the mean of squares in the norm.
    """

    conv: torch.Tensor
    added: torch.Tensor
    factor: torch.Tensor
    norm: torch.Tensor
    epsilon: float


class DeltaForm(NamedTuple):
    """How a delta net forgets and gates. The defaults are a gated delta net's.

    Attributes:
        decays: decays of a head: one, or one for each number of a key.
        lowest: where it is not 0 a state keeps e^(lowest sigmoid(-factor (a + added))) of itself.
        rounded_decay: whether the exponent is rounded to bf16.
        strict: whether the norm rounds nothing.
        gate: the function of z, a result's factor.
    """

    decays: int = 1
    lowest: float = 0.0
    rounded_decay: bool = False
    strict: bool = False
    gate: Callable[[torch.Tensor], torch.Tensor] = F.silu


GATED = DeltaForm()
"""A gated delta net's form."""


class DeltaState(NamedTuple):
    """A sequence's state in one layer before a call, and the place for the state after it, the same one or another.

    Attributes:
        before: the last inputs of the convolution, bf16 [channels, taps], and the state of the recurrence, float32
            [heads, key_dim, value_dim]; None: the sequence has no token.
        after: the same sizes.
        earlier: rows of tokens before the call that `before` does not have, bf16 [N, reads]; None: it has all.
    """

    before: tuple[torch.Tensor, torch.Tensor] | None
    after: tuple[torch.Tensor, torch.Tensor]
    earlier: torch.Tensor | None = None

    @property
    def shapes(self) -> set[tuple[tuple[int, ...], ...]]:
        """The sizes of both states; one pair where they agree."""
        return {tuple(tuple(each.shape) for each in pair) for pair in (self.before, self.after) if pair}

    def run(self, tokens: int) -> DeltaRun:
        """The structure of a call's rows, all of one sequence."""
        conv, state = self.before or (None, None)
        return DeltaRun(
            conv=None if conv is None else conv.data_ptr(),
            state=None if state is None else state.data_ptr(),
            next_conv=self.after[0].data_ptr(),
            next_state=self.after[1].data_ptr(),
            earlier=None if self.earlier is None else self.earlier.data_ptr(),
            earlier_count=0 if self.earlier is None else len(self.earlier),
            tokens=tokens,
        )

    @classmethod
    def of(cls, layer: LayerState, reads: int) -> DeltaState:
        """The state of a layer whose rows have `reads` numbers."""
        return cls(layer.before, layer.after, layer.earlier(reads))


class NativeDeltaNet:
    """The part of a gated delta net between its projections.

    Attributes:
        reads: numbers of a token's row: inputs of the convolution, z [heads, value_dim] of the output's gate, b [heads]
            of the rate at which a token replaces what its key finds, and a [heads * decays] of the decays.
        writes: numbers of a token's results.

    Raises:
        ValueError: sizes that differ, or keys of more than MOST_KEY_DIM numbers.
    """

    def __init__(self, sizes: DeltaSizes, weights: DeltaWeights, form: DeltaForm = GATED) -> None:
        key_heads, heads, key_dim, value_dim = sizes
        channels, taps = weights.conv.shape
        one = weights.added, weights.factor
        decays = (heads * form.decays,), (heads,)
        if channels != sizes.channels or tuple(each.shape for each in one) != decays or heads % key_heads:
            raise ValueError(
                f"expected {sizes.channels} channels and {heads} decays, got {channels} channels"
            )
        if weights.norm.shape != (value_dim,) or key_dim > MOST_KEY_DIM:
            raise ValueError(
                f"expected a norm of {value_dim} and keys of at most {MOST_KEY_DIM}, got {key_dim}"
            )
        self.sizes, self._taps = sizes, taps
        self.reads, self.writes = channels + heads * (value_dim + 1 + form.decays), heads * value_dim
        floats = [each.detach().float().contiguous() for each in (weights.conv.t(), *one, weights.norm)]
        tables = values_of(F.silu), values_of(torch.sigmoid), wide_values_of(form.gate)
        self._kept = floats, tables  # keeps the addresses valid
        names = "conv", "added", "factor", "norm", "silu", "sigmoid", "wide_gate"
        self._structure = DeltaNet(
            **sizes._asdict(),
            taps=taps,
            epsilon=weights.epsilon,
            decays=form.decays,
            lowest=form.lowest,
            rounded_decay=form.rounded_decay,
            strict=form.strict,
            rounded=weights.norm.dtype == torch.bfloat16 and not form.strict,
            **{name: each.data_ptr() for name, each in zip(names, (*floats, *tables), strict=True)},
        )

    @property
    def address(self) -> int:
        """The address of its structure; valid as long as this object."""
        return ctypes.addressof(self._structure)

    def __call__(self, projected: torch.Tensor, state: DeltaState) -> torch.Tensor:
        """Computes consecutive tokens of one sequence; a token's bits do not depend on how many a call has.

        Args:
            projected: bf16 [T, reads], contiguous.
            state: the sequence's states before the tokens, and the memory that its states after them are written to.

        Returns:
            bf16 [T, writes].

        Raises:
            MemoryError: no memory for the call.
            ValueError: sizes of the arguments differ.
        """
        _, heads, key_dim, value_dim = self.sizes
        want = (self.sizes.channels, self._taps), (heads, key_dim, value_dim)
        given = state.shapes
        if projected.shape[1:] != (self.reads,) or not projected.is_contiguous() or given != {want}:
            raise ValueError(f"expected rows of {self.reads} and states of {want}, got {given}")
        out = projected.new_empty(len(projected), self.writes)
        run = state.run(len(projected))
        result = native.library().edgemoe_delta_net(
            *(native.threads(), self.address, projected.data_ptr(), 1),
            *(ctypes.byref(run), out.data_ptr()),
        )
        if result:
            raise native.failure(result, "a gated delta net")
        return out
