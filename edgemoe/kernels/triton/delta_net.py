"""One new token of a delta net between its projections and the product after it: one launch, which a graph can hold.

A program computes one head of values: the convolution of its channels, the recurrence over its state, and the gated
norm. The state before the token and the state after it are two places, so no program reads what another one writes.
Values are rounded to bf16 where csrc/delta_net.c and transformers' modules round; sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.convolution import convolve, rounded_silu
from edgemoe.kernels.triton.products import OPTIONS

_ELEMENTS_PER_THREAD = 128
"""Numbers of a head's state per thread: with fewer, every thread loads the numbers of the keys again."""

_MOST_STATE = 1 << 15
"""Largest padded size of a head's state, key_dim * value_dim, which stays in registers."""


class DeltaInputs(NamedTuple):
    """The projections of one token, bf16, each by heads of keys: contiguous within a head.

    Attributes:
        q, k: [key_heads, key_dim].
        v, z: [key_heads, heads / key_heads * value_dim]: values, and the gate of the results.
        b: [key_heads, heads / key_heads], of the rates at which a token replaces what its key finds.
        a: [key_heads, heads / key_heads * decays].
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    z: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor


@dataclass(frozen=True)
class DeltaStep:
    """The weights and the form of a delta net, as kernels.native.delta_net.DeltaWeights and DeltaForm describe them.

    Args:
        heads: heads of values, a multiple of the heads of keys.
        value_dim: size of a value.
        conv: bf16 [channels, taps], contiguous, the oldest input's first.
        added: [heads * decays], added to `a`.
        log_factor: [heads]; the state keeps e^(-e^log_factor softplus(a + added)) of itself.
        norm: bf16 or float32 [value_dim].
        epsilon: the epsilon of the norm.
        lowest: where it is not 0 the state keeps e^(lowest sigmoid(e^log_factor (a + added))) of itself.
        rounded_decay: whether the exponent is rounded to bf16.
        strict: whether the norm rounds nothing, and z's function is the sigmoid; else it is silu.
    """

    heads: int
    value_dim: int
    conv: torch.Tensor
    added: torch.Tensor
    log_factor: torch.Tensor
    norm: torch.Tensor
    epsilon: float
    lowest: float = 0.0
    rounded_decay: bool = False
    strict: bool = False

    @staticmethod
    def fits(key_dim: int, value_dim: int) -> bool:
        """Whether the state of a head fits the registers of a program."""
        return bool(triton.next_power_of_2(key_dim) * triton.next_power_of_2(value_dim) <= _MOST_STATE)

    def launch(
        self,
        inputs: DeltaInputs,
        before: tuple[torch.Tensor, torch.Tensor] | None,
        after: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Launches one token.

        Args:
            inputs: the projections of the token.
            before: the state before the token: bf16 [channels, taps] and float32 [heads, key_dim, value_dim],
                contiguous; None: the sequence has no token.
            after: where the state after it is written, another place than `before`.
            out: bf16 [heads * value_dim], the results.
        """
        key_heads, key_dim = inputs.q.shape
        form = self.form(key_heads, key_dim, [each.stride(0) for each in inputs])
        weights = self.conv, self.added, self.log_factor, self.norm
        states = *(before or (None, None)), *after
        warps = max(form.keys * form.values // (32 * _ELEMENTS_PER_THREAD), 1)
        delta_step[(self.heads,)](*inputs, *weights, *states, out, form, num_warps=warps, **OPTIONS)

    def form(self, key_heads: int, key_dim: int, strides: Sequence[int]) -> StepForm:
        """The compile-time constants of a launch, with these strides of its inputs."""
        return StepForm(
            key_heads,
            self.heads,
            *(key_dim, self.value_dim),
            *(triton.next_power_of_2(key_dim), triton.next_power_of_2(self.value_dim)),
            taps=self.conv.shape[1],
            decays=self.added.numel() // self.heads,
            epsilon=self.epsilon,
            lowest=self.lowest,
            rounded_decay=self.rounded_decay,
            strict=self.strict,
            rounded=not self.strict and self.norm.dtype == torch.bfloat16,
            strides=tuple(strides),
        )


@dataclass(frozen=True)
class StepForm:
    """The compile-time constants of a launch.

    Args:
        key_heads, heads, key_dim, value_dim: numbers and sizes of heads.
        keys, values: key_dim and value_dim, padded to powers of two.
        taps: inputs of the convolution, this token's included.
        decays: decays per head: one, or one for each number of a key.
        epsilon, lowest, rounded_decay, strict: values of DeltaStep.
        rounded: whether the norm's product is rounded before the gate.
        strides: numbers from one head of keys to the next in each of DeltaInputs.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    keys: int
    values: int
    taps: int
    decays: int
    epsilon: float
    lowest: float
    rounded_decay: bool
    strict: bool
    rounded: bool
    strides: tuple[int, ...]


@triton.jit
def delta_step(
    q, k, v, z, b, a, conv, added, factors, norm, conv0, state0, conv1, state1, out, F: tl.constexpr
):
    """Program h computes head h of the values, from the state conv0 and state0 to conv1 and state1: see DeltaStep."""
    SHARING: tl.constexpr = F.heads // F.key_heads
    head = tl.program_id(0)
    key_head, part = head // SHARING, head % SHARING
    i, j = tl.arange(0, F.keys), tl.arange(0, F.values)
    first = part == 0
    channel = key_head * F.key_dim + i
    query = _convolved(q + key_head * F.strides[0] + i, conv, conv0, conv1, channel, i < F.key_dim, first, F)
    channel += F.key_heads * F.key_dim
    key = _convolved(k + key_head * F.strides[1] + i, conv, conv0, conv1, channel, i < F.key_dim, first, F)
    channel = 2 * F.key_heads * F.key_dim + head * F.value_dim + j
    at = v + key_head * F.strides[2] + part * F.value_dim + j
    value = _convolved(at, conv, conv0, conv1, channel, j < F.value_dim, head >= 0, F)
    query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) * tl.rsqrt(F.key_dim * 1.0)
    key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)

    rate = tl.sigmoid(tl.load(b + key_head * F.strides[4] + part).to(tl.float32))
    rate = rate.to(tl.bfloat16).to(tl.float32)
    own = a + key_head * F.strides[5] + part * F.decays
    stays = part_that_stays(own, added + head * F.decays, tl.load(factors + head), i, F)
    result = _recur(state0, state1, head, query, key, value, stays, rate, i, j, F)
    gate = z + key_head * F.strides[3] + part * F.value_dim
    gated_norm(result, norm, gate, out + head * F.value_dim, j, F)


@triton.jit
def _recur(state0, state1, head, query, key, value, stays, rate, i, j, F: tl.constexpr):
    """The result of a head; its state after the token goes to state1."""
    KEYS: tl.constexpr = F.keys  # before Triton 3.8 a shape takes no fields of F
    VALUES: tl.constexpr = F.values
    cell = head.to(tl.int64) * F.key_dim * F.value_dim + i[:, None] * F.value_dim + j[None, :]
    inside = (i < F.key_dim)[:, None] & (j < F.value_dim)[None, :]
    state = tl.zeros((KEYS, VALUES), tl.float32)
    if state0 is not None:
        state = tl.load(state0 + cell, mask=inside, other=0)
    state *= stays
    change = (value - tl.sum(state * key[:, None], 0)) * rate
    state += key[:, None] * change[None, :]
    tl.store(state1 + cell, state, mask=inside)
    return tl.sum(state * query[:, None], 0)


@triton.jit
def _convolved(x, conv, before, after, channel, inside, stored, F: tl.constexpr):
    """silu of the convolution of channels with the new inputs x; where `stored` it writes their inputs to `after`."""
    TAPS: tl.constexpr = F.taps
    new = tl.load(x, mask=inside, other=0)
    return rounded_silu(convolve(new, conv, None, before, after, channel, inside, stored, TAPS))


@triton.jit
def part_that_stays(a, added, log_factor, i, F: tl.constexpr):
    """The part of a head's state that stays: one number, or one for each row [keys, 1]."""
    if F.decays == 1:
        number = tl.load(a).to(tl.float32) + tl.load(added).to(tl.float32)
    else:
        number = tl.load(a + i, mask=i < F.key_dim, other=0).to(tl.float32)
        number += tl.load(added + i, mask=i < F.key_dim, other=0).to(tl.float32)
        number = number[:, None]
    factor = tl.exp(log_factor.to(tl.float32))
    if F.lowest != 0:
        exponent = F.lowest * tl.sigmoid(factor * number)
    else:
        grown = tl.exp(number)
        more = 1 + grown
        # log(1 + grown) without the error of the sum.
        soft = tl.where(more == 1, grown, tl.log(more) * (grown / (more - 1)))
        exponent = -factor * tl.where(number > 20, number, soft)
    if F.rounded_decay:
        exponent = exponent.to(tl.bfloat16).to(tl.float32)
    return tl.exp(exponent)


@triton.jit
def gated_norm(result, norm, gate, out, j, F: tl.constexpr):
    """Writes the norm of a head's result, times the function of its gate."""
    result = result.to(tl.bfloat16).to(tl.float32)
    result *= tl.rsqrt(tl.sum(result * result, 0) / F.value_dim + F.epsilon)
    if not F.strict:
        result = result.to(tl.bfloat16).to(tl.float32)
    result *= tl.load(norm + j, mask=j < F.value_dim, other=0).to(tl.float32)
    if F.rounded:
        result = result.to(tl.bfloat16).to(tl.float32)
    number = tl.load(gate + j, mask=j < F.value_dim, other=0).to(tl.float32)
    result *= tl.sigmoid(number)
    if not F.strict:
        result *= number
    tl.store(out + j, result.to(tl.bfloat16), mask=j < F.value_dim)
