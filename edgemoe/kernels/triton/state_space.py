"""One new token of a selective state space (Mamba-2) between its projection and the product after it: two launches.

The first computes a head per program: the convolution of its channels and the recurrence over its state; the second
computes the gated norm, a group of numbers per program. Sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.convolution import convolve, rounded_silu
from edgemoe.kernels.triton.products import OPTIONS

_ELEMENTS_PER_THREAD = 32
"""Numbers of a head's state per thread."""

_MOST_STATE = 1 << 15
"""Largest padded size of a head's state, which stays in registers."""


@dataclass(frozen=True)
class SpaceForm:
    """The compile-time constants of a state space.

    Args:
        groups: groups of heads that share keys and queries.
        heads, value_dim: heads, and size of a head's values.
        key_dim: size of a key and of a query.
        taps: inputs of the convolution, this token's included.
        norm_size: numbers that are normalised together.
        lowest, highest: limits of a head's step.
        epsilon: the epsilon of the norm.
    """

    groups: int
    heads: int
    value_dim: int
    key_dim: int
    taps: int
    norm_size: int
    lowest: float
    highest: float
    epsilon: float
    values: int
    keys: int
    norms: int


@dataclass(frozen=True)
class SpaceStep:
    """The weights of a state space, as transformers' module has them.

    Args:
        groups: groups of heads that share keys and queries.
        key_dim: size of a key and of a query.
        norm_size: numbers that are normalised together.
        limits: lowest and highest step of a head.
        epsilon: the epsilon of the norm.
        conv: bf16 [channels, taps], contiguous, the oldest input's first.
        bias: bf16 [channels], of the convolution; None: none.
        added: [heads], added to a head's step.
        log_factor: [heads]; the state keeps e^(-e^log_factor step) of itself.
        skip: [heads], factors of the values in the results.
        norm: [heads * value_dim], the weight of the norm.
    """

    groups: int
    key_dim: int
    norm_size: int
    limits: tuple[float, float]
    epsilon: float
    conv: torch.Tensor
    bias: torch.Tensor | None
    added: torch.Tensor
    log_factor: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor

    @staticmethod
    def fits(value_dim: int, key_dim: int) -> bool:
        """Whether the state of a head fits the registers of a program."""
        return bool(triton.next_power_of_2(value_dim) * triton.next_power_of_2(key_dim) <= _MOST_STATE)

    def launch(
        self,
        projected: torch.Tensor,
        before: tuple[torch.Tensor, torch.Tensor] | None,
        after: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Launches one token.

        Args:
            projected: bf16: z [heads * value_dim], the channels (values, keys, queries), steps [heads].
            before: the state before the token: bf16 [channels, taps] and float32 [heads, value_dim, key_dim],
                contiguous; None: the sequence has no token.
            after: where the state after it is written, another place than `before`.
            out: bf16 [heads * value_dim], the results.
        """
        heads, inner = len(self.skip), len(out)
        value_dim = inner // heads
        form = SpaceForm(
            *(self.groups, heads, value_dim, self.key_dim, self.conv.shape[1], self.norm_size),
            *(float(self.limits[0]), float(self.limits[1]), self.epsilon),
            *map(triton.next_power_of_2, (value_dim, self.key_dim, self.norm_size)),
        )
        weights = self.conv, self.bias, self.added, self.log_factor, self.skip
        states = *(before or (None, None)), *after
        warps = max(form.values * form.keys // (32 * _ELEMENTS_PER_THREAD), 1)
        space_step[(heads,)](projected, *weights, *states, out, form, num_warps=warps, **OPTIONS)
        warps = min(max(form.norms // 256, 1), 8)
        space_norm[(inner // self.norm_size,)](projected, self.norm, out, form, num_warps=warps, **OPTIONS)


@triton.jit
def space_step(
    projected, conv, bias, added, factors, skip, conv0, state0, conv1, state1, out, F: tl.constexpr
):
    """Program h computes head h, from the state conv0 and state0 to conv1 and state1: see SpaceStep."""
    TAPS: tl.constexpr = F.taps
    KEYS: tl.constexpr = F.keys  # before Triton 3.8 a shape takes no fields of F
    VALUES: tl.constexpr = F.values
    head = tl.program_id(0)
    IN_GROUP: tl.constexpr = F.heads // F.groups
    group = head // IN_GROUP
    first = head % IN_GROUP == 0
    i, j = tl.arange(0, F.values), tl.arange(0, F.keys)
    x = projected + F.heads * F.value_dim
    channel = head * F.value_dim + i
    inside = i < F.value_dim
    new = tl.load(x + channel, mask=inside, other=0)
    value = rounded_silu(convolve(new, conv, bias, conv0, conv1, channel, inside, head >= 0, TAPS))
    channel = F.heads * F.value_dim + group * F.key_dim + j
    new = tl.load(x + channel, mask=j < F.key_dim, other=0)
    key = rounded_silu(convolve(new, conv, bias, conv0, conv1, channel, j < F.key_dim, first, TAPS))
    channel += F.groups * F.key_dim
    new = tl.load(x + channel, mask=j < F.key_dim, other=0)
    query = rounded_silu(convolve(new, conv, bias, conv0, conv1, channel, j < F.key_dim, first, TAPS))
    number = tl.load(x + F.heads * F.value_dim + 2 * F.groups * F.key_dim + head).to(tl.float32)
    step = _step_of(number + tl.load(added + head).to(tl.bfloat16).to(tl.float32), F)
    cell = head.to(tl.int64) * F.value_dim * F.key_dim + i[:, None] * F.key_dim + j[None, :]
    valid = inside[:, None] & (j < F.key_dim)[None, :]
    state = tl.zeros((VALUES, KEYS), tl.float32)
    if state0 is not None:
        state = tl.load(state0 + cell, mask=valid, other=0)
    state *= tl.exp(-tl.exp(tl.load(factors + head).to(tl.float32)) * step)
    state += (value * step)[:, None] * key[None, :]
    tl.store(state1 + cell, state, mask=valid)
    result = tl.sum(state * query[None, :], 1) + tl.load(skip + head).to(tl.float32) * value
    tl.store(out + head * F.value_dim + i, result.to(tl.bfloat16), mask=inside)


@triton.jit
def _step_of(number, F: tl.constexpr):
    """A head's step: softplus of a number, rounded to bf16 before and after, within its limits."""
    number = number.to(tl.bfloat16).to(tl.float32)
    grown = tl.exp(number)
    more = 1 + grown
    # log(1 + grown) without the error of the sum.
    soft = tl.where(more == 1, grown, tl.log(more) * (grown / (more - 1)))
    step = tl.where(number > 20, number, soft).to(tl.bfloat16).to(tl.float32)
    return tl.minimum(tl.maximum(step, F.lowest), F.highest)


@triton.jit
def space_norm(z, weight, out, F: tl.constexpr):
    """A program replaces some numbers of out by norm(out silu(z))."""
    at = tl.arange(0, F.norms)
    inside = at < F.norm_size
    at += tl.program_id(0) * F.norm_size
    gate = tl.load(z + at, mask=inside, other=0).to(tl.float32)
    x = tl.load(out + at, mask=inside, other=0).to(tl.float32) * gate * tl.sigmoid(gate)
    x *= tl.rsqrt(tl.sum(x * x, 0) / F.norm_size + F.epsilon)
    x = x.to(tl.bfloat16).to(tl.float32) * tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    tl.store(out + at, x.to(tl.bfloat16), mask=inside)
