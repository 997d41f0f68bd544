"""Consecutive tokens of a delta net, such as a prompt's, in five launches for any number of tokens.

Convolutions of all tokens come first, a head of one token per program; then the recurrence, in which a program goes
through all tokens with some columns of a head's state in registers; then the gated norm. Each token has the rounding of
kernels.triton.delta_net.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.convolution import rounded_silu
from edgemoe.kernels.triton.delta_net import DeltaInputs, DeltaStep, gated_norm, part_that_stays
from edgemoe.kernels.triton.products import OPTIONS

_COLS = 16
"""Columns of a head's state per program of the recurrence, which is one warp."""


def launch_rows(
    step: DeltaStep,
    inputs: DeltaInputs,
    before: tuple[torch.Tensor, torch.Tensor] | None,
    after: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Launches some tokens of one sequence; a single one by DeltaStep.launch, unless it continues in place.

    Args:
        step: weights and form of the delta net.
        inputs: the projections; before the dimensions of DeltaInputs they have one of R tokens.
        before: the state before the tokens: bf16 [channels, taps] and float32 [heads, key_dim, value_dim], contiguous;
            None: the sequence has no token.
        after: where the state after them is written, which may be the place of `before`.
        out: bf16 [R, heads * value_dim], contiguous, the results.
    """
    rows, key_heads, key_dim = inputs.q.shape
    if rows == 1 and (before is None or before[0].data_ptr() != after[0].data_ptr()):
        step.launch(DeltaInputs(*(each[0] for each in inputs)), before, after, out)
        return
    form = step.form(key_heads, key_dim, [each.stride(1) for each in inputs])
    convolved = _convolved(step, inputs, None if before is None else before[0], after[0])
    states = before[1] if before else None, after[1]
    strides = inputs.b.stride(0), inputs.a.stride(0)
    weights = step.added, step.log_factor
    recur_rows[(step.heads, triton.cdiv(step.value_dim, _COLS))](
        *(convolved, inputs.b, inputs.a, *weights, *states, out, rows, *strides, form, _COLS),
        num_warps=1,
        **OPTIONS,
    )
    norm_rows[(rows, step.heads)](out, inputs.z, step.norm, inputs.z.stride(0), form, num_warps=1, **OPTIONS)


def _convolved(
    step: DeltaStep, inputs: DeltaInputs, before: torch.Tensor | None, after: torch.Tensor
) -> torch.Tensor:
    """Launches the convolutions: float32 [R, channels], with queries and keys normalised."""
    rows, key_heads, key_dim = inputs.q.shape
    channels, taps = step.conv.shape
    out = inputs.q.new_empty(rows, channels, dtype=torch.float32)
    # Programs of the first tokens read the inputs before them while another one writes the inputs after the last token.
    earlier = None if before is None else before.clone()
    keys, values, first = (key_heads, key_dim), (step.heads, step.value_dim), 0
    for x, (heads, size), factor in zip(
        inputs[:3], (keys, keys, values), (key_dim**-0.5, 1.0, 0.0), strict=True
    ):
        convolve_rows[(rows, heads)](
            *(x, step.conv, earlier, after, out, rows, *x.stride()[:2], channels, first, size, factor),
            *(factor > 0, heads // key_heads, taps, triton.next_power_of_2(size)),
            num_warps=1,
            **OPTIONS,
        )
        first += heads * size
    return out


@triton.jit
def convolve_rows(
    x,
    conv,
    before,
    after,
    convolved,
    rows,
    row_stride,
    stride,
    channels,
    first,
    size,
    factor,
    NORMALISED: tl.constexpr,
    SHARING: tl.constexpr,
    TAPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One head of one token: silu of its convolution, normalised and scaled where it is a query or a key."""
    row, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, SIZE)
    inside = i < size
    channel = first + head * size + i
    own = x + (head // SHARING) * stride + (head % SHARING) * size + i
    total = tl.zeros((SIZE,), tl.float32)
    for tap in tl.static_range(TAPS):
        number = _input(own, before, row - (TAPS - 1) + tap, row_stride, channel, inside, TAPS)
        total += number * tl.load(conv + channel * TAPS + tap, mask=inside, other=0).to(tl.float32)
    result = rounded_silu(total)
    if NORMALISED:
        result *= tl.rsqrt(tl.sum(result * result, 0) + 1e-6) * factor
    tl.store(convolved + row.to(tl.int64) * channels + channel, result, mask=inside)
    if row == rows - 1:
        for tap in tl.static_range(TAPS):
            last = _input(own, before, rows - TAPS + tap, row_stride, channel, inside, TAPS)
            tl.store(after + channel * TAPS + tap, last.to(tl.bfloat16), mask=inside)


@triton.jit
def _input(x, before, row, row_stride, channel, inside, TAPS: tl.constexpr):
    """The inputs of channels in a row; rows below 0 come from the state before, or are 0."""
    number = tl.load(x + row.to(tl.int64) * row_stride, mask=tl.where(row >= 0, inside, False), other=0)
    if before is not None:
        number += tl.load(
            before + channel * TAPS + TAPS + row, mask=tl.where(row < 0, inside, False), other=0
        )
    return number.to(tl.float32)


@triton.jit
def recur_rows(
    mixed, b, a, added, factors, state0, state1, out, rows, b_row, a_row, F: tl.constexpr, COLS: tl.constexpr
):
    """All tokens in some columns of one head, whose results go to out before the norm."""
    SHARING: tl.constexpr = F.heads // F.key_heads
    CHANNELS: tl.constexpr = 2 * F.key_heads * F.key_dim + F.heads * F.value_dim
    head = tl.program_id(0)
    key_head, part = head // SHARING, head % SHARING
    i, j = tl.arange(0, F.keys), tl.program_id(1) * COLS + tl.arange(0, COLS)
    key_inside, inside = i < F.key_dim, j < F.value_dim
    cell = head.to(tl.int64) * F.key_dim * F.value_dim + i[:, None] * F.value_dim + j[None, :]
    valid = key_inside[:, None] & inside[None, :]
    KEYS: tl.constexpr = F.keys
    state = tl.zeros((KEYS, COLS), tl.float32)
    if state0 is not None:
        state = tl.load(state0 + cell, mask=valid, other=0)
    factor = tl.load(factors + head)
    own = mixed + key_head * F.key_dim + i
    own_value = mixed + 2 * F.key_heads * F.key_dim + head * F.value_dim + j
    b += key_head * F.strides[4] + part
    a += key_head * F.strides[5] + part * F.decays
    out += head * F.value_dim + j
    for _row in range(rows):
        query = tl.load(own, mask=key_inside, other=0)
        key = tl.load(own + F.key_heads * F.key_dim, mask=key_inside, other=0)
        value = tl.load(own_value, mask=inside, other=0)
        rate = tl.sigmoid(tl.load(b).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
        state *= part_that_stays(a, added + head * F.decays, factor, i, F)
        change = (value - tl.sum(state * key[:, None], 0)) * rate
        state += key[:, None] * change[None, :]
        tl.store(out, tl.sum(state * query[:, None], 0).to(tl.bfloat16), mask=inside)
        own += CHANNELS
        own_value += CHANNELS
        b += b_row
        a += a_row
        out += F.heads * F.value_dim
    tl.store(state1 + cell, state, mask=valid)


@triton.jit
def norm_rows(out, z, norm, z_stride, F: tl.constexpr):
    """The gated norm of one head of one token, in place."""
    SHARING: tl.constexpr = F.heads // F.key_heads
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    j = tl.arange(0, F.values)
    own = out + (row * F.heads + head) * F.value_dim
    gate = z + row * z_stride + (head // SHARING) * F.strides[3] + (head % SHARING) * F.value_dim
    gated_norm(tl.load(own + j, mask=j < F.value_dim, other=0).to(tl.float32), norm, gate, own, j, F)
