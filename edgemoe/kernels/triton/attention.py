"""Grouped-query attention of one new token over a preallocated KV, by kernels that a graph can hold.

What changes from token to token lies in device memory (`STATE`, `PLACE`): the token's position and where its sequence's
keys and values are in each layer. So a graph captured once serves every position and every sequence. Keys and values
are split over programs, whose parts a second kernel adds up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.products import OPTIONS

STATE, PLACE = 2, 3
"""int64 numbers of a token: its position and id. Then for each layer: the addresses of the first head's row of token 0
in keys and in values, or where it would be if rows have moved, and the number of rows from one head to the next.
"""

_STATE, _PLACE = tl.constexpr(STATE), tl.constexpr(PLACE)

SPLITS, BLOCK = 16, 64
"""Parts that keys and values are split into, and tokens that a program loads at a time."""

_INTERPRETED = bool(triton.knobs.runtime.interpret)

_ROUNDED: dict[str, Any] = OPTIONS | {"enable_fp_fusion": False}
"""Options of `rotate`: fused to a bf16 multiply-add, its products would not be rounded as transformers rounds them."""


@dataclass(frozen=True)
class RowAttention:
    """The attention of one layer.

    Args:
        heads, kv_heads: numbers of heads of queries, and of keys and values.
        dim: size of a head, even.
        norms: weight, bf16, and epsilon of the queries' norm and of the keys' norm; None: no norms. A weight has the
            size of one head or of all heads together.
        scaling: factor on the scores.
        window: latest tokens that a row attends to, itself included; 0: all.
        layer: index of the layer in the model.
    """

    heads: int
    kv_heads: int
    dim: int
    norms: tuple[tuple[torch.Tensor, float], tuple[torch.Tensor, float]] | None
    scaling: float
    window: int
    layer: int

    def launch(
        self,
        qkv: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        state: torch.Tensor,
        queries: torch.Tensor,
        scratch: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Launches norms, rotation, the KV's new entry, and the attention to all entries.

        Args:
            qkv: bf16 [(heads + 2 kv_heads) dim].
            rotation: cosine and sine, bf16 [dim].
            state: int64 [STATE + PLACE * layers].
            queries: bf16 [heads dim], scratch.
            scratch: float32 [scratch_size(heads, dim)].
            out: bf16 [heads dim].
        """
        dim = max(triton.next_power_of_2(self.dim), 16)
        (q, q_epsilon), (k, k_epsilon) = self.norms or ((None, 0.0), (None, 0.0))
        spans = (0 if norm is None else norm.numel() for norm in (q, k))
        rotate[(self.heads + 2 * self.kv_heads,)](
            *(qkv, q, k, q_epsilon, k_epsilon, *rotation, state, queries, self.layer),
            *(self.heads, self.kv_heads, self.dim, dim, *spans),
            **_ROUNDED,
        )
        group = self.heads // self.kv_heads
        attend[(self.kv_heads, SPLITS)](
            *(queries, state, scratch, self.layer, self.scaling, self.window),
            *(group, max(triton.next_power_of_2(group), 16), self.kv_heads, self.dim, dim, SPLITS, BLOCK),
            tl.float32 if _INTERPRETED else tl.bfloat16,
            **OPTIONS,
        )
        sizes = group, self.kv_heads, self.dim, dim, SPLITS
        combine[(self.heads,)](scratch, out, *sizes, num_warps=1, **OPTIONS)


def scratch_size(heads: int, dim: int) -> int:
    """float32 numbers of scratch memory: each part's sums, largest score and sum of weights, for every head."""
    return heads * SPLITS * (dim + 2)


@triton.jit
def rotate(
    qkv,
    q_norm,
    k_norm,
    q_epsilon,
    k_epsilon,
    cosine,
    sine,
    state,
    queries,
    layer,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    Q_SPAN: tl.constexpr,
    K_SPAN: tl.constexpr,
):
    """Normalises and rotates a head of queries or keys; a program takes a head. Keys and values go into the KV."""
    head = tl.program_id(0)
    lane = tl.arange(0, DIM_PADDED)
    inside = lane < DIM
    if head < HEADS:
        row = _rotated(qkv, q_norm, q_epsilon, cosine, sine, head, lane, DIM, Q_SPAN)
        tl.store(queries + head * DIM + lane, row, mask=inside)
    else:
        place = state + _STATE + _PLACE * layer
        at = (head - HEADS) % KV_HEADS * tl.load(place + 2) + tl.load(state)
        if head < HEADS + KV_HEADS:
            keys = tl.load(place).to(tl.pointer_type(tl.bfloat16))
            row = _rotated(
                qkv + HEADS * DIM, k_norm, k_epsilon, cosine, sine, head - HEADS, lane, DIM, K_SPAN
            )
            tl.store(keys + at * DIM + lane, row, mask=inside)
        else:
            values = tl.load(place + 1).to(tl.pointer_type(tl.bfloat16))
            tl.store(
                values + at * DIM + lane, tl.load(qkv + head * DIM + lane, mask=inside, other=0), mask=inside
            )


@triton.jit
def _rotated(x, norm, epsilon, cosine, sine, head, lane, DIM: tl.constexpr, SPAN: tl.constexpr):
    """bf16: a head of x, normalised over SPAN elements (0: not), and rotated by halves."""
    HALF: tl.constexpr = DIM // 2
    inside = lane < DIM
    other = tl.where(lane < HALF, lane + HALF, lane - HALF)
    own = tl.load(x + head * DIM + lane, mask=inside, other=0).to(tl.float32)
    pair = tl.load(x + head * DIM + other, mask=inside, other=0).to(tl.float32)
    if SPAN > 0:
        at = 0
        if SPAN == DIM:
            square = tl.sum(own * own, 0)
        else:
            at = head * DIM
            every = tl.arange(0, triton.next_power_of_2(SPAN))
            whole = tl.load(x + every, mask=every < SPAN, other=0).to(tl.float32)
            square = tl.sum(whole * whole, 0)
        scale = tl.rsqrt(square / SPAN + epsilon)
        own = _weighted(own * scale, norm + at + lane, inside)
        pair = _weighted(pair * scale, norm + at + other, inside)
    cos = tl.load(cosine + lane, mask=inside, other=0).to(tl.float32)
    sin = tl.load(sine + lane, mask=inside, other=0).to(tl.float32)
    turned = (tl.where(lane < HALF, -pair, pair) * sin).to(tl.bfloat16).to(tl.float32)
    return ((own * cos).to(tl.bfloat16).to(tl.float32) + turned).to(tl.bfloat16)


@triton.jit
def _weighted(scaled, weight, inside):
    """float32 of bf16: scaled, rounded, times the norm's weight, rounded."""
    weights = tl.load(weight, mask=inside, other=0).to(tl.float32)
    return (scaled.to(tl.bfloat16).to(tl.float32) * weights).to(tl.bfloat16).to(tl.float32)


@triton.jit
def attend(
    queries,
    state,
    scratch,
    layer,
    scaling,
    window,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """The sums of a part of the tokens, with their largest score and the sum of their weights, for a head of keys."""
    kv_head, part = tl.program_id(0), tl.program_id(1)
    end, place = tl.load(state) + 1, state + _STATE + _PLACE * layer
    first = tl.maximum(end - window, 0)
    if window == 0:
        first = first * 0
    each = tl.cdiv(tl.cdiv(end - first, SPLITS), BLOCK) * BLOCK
    low = first + part * each
    high = tl.minimum(low + each, end)
    group, lane, token = tl.arange(0, GROUP_PADDED), tl.arange(0, DIM_PADDED), tl.arange(0, BLOCK)
    known, wide = group < GROUP, lane < DIM
    at = (kv_head * GROUP + group)[:, None] * DIM + lane[None, :]
    query = tl.load(queries + at, mask=known[:, None] & wide[None, :], other=0).to(OPERAND)
    base = kv_head * tl.load(place + 2) * DIM
    keys = tl.load(place).to(tl.pointer_type(tl.bfloat16)) + base
    values = tl.load(place + 1).to(tl.pointer_type(tl.bfloat16)) + base
    most = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PADDED,), tl.float32)
    sums = tl.zeros((GROUP_PADDED, DIM_PADDED), tl.float32)
    for start in range(low, high, BLOCK):
        seen = start + token < high
        places = (start + token) * DIM
        key = tl.load(keys + places[None, :] + lane[:, None], mask=seen[None, :] & wide[:, None], other=0).to(
            OPERAND
        )
        scores = tl.dot(query, key) * (scaling * 1.4426950408889634)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - highest[:, None]), tl.exp2(most - highest)
        value = tl.load(
            values + places[:, None] + lane[None, :], mask=seen[:, None] & wide[None, :], other=0
        ).to(OPERAND)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(tl.bfloat16).to(OPERAND), value)
        most = highest
    row = (kv_head * SPLITS + part) * GROUP + group
    tl.store(scratch + row[:, None] * DIM + lane[None, :], sums, mask=known[:, None] & wide[None, :])
    largest = scratch + KV_HEADS * SPLITS * GROUP * DIM
    tl.store(largest + row, most, mask=known)
    tl.store(largest + KV_HEADS * SPLITS * GROUP + row, total, mask=known)


@triton.jit
def combine(
    scratch,
    out,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A head's output from the parts of `attend`; a program takes a head."""
    head = tl.program_id(0)
    part, lane = tl.arange(0, SPLITS), tl.arange(0, DIM_PADDED)
    row = (head // GROUP * SPLITS + part) * GROUP + head % GROUP
    largest = scratch + KV_HEADS * SPLITS * GROUP * DIM
    most = tl.load(largest + row)
    weight = tl.exp2(most - tl.max(most, 0))
    total = tl.sum(weight * tl.load(largest + KV_HEADS * SPLITS * GROUP + row), 0)
    sums = tl.load(scratch + row[:, None] * DIM + lane[None, :], mask=(lane < DIM)[None, :], other=0)
    summed = tl.sum(sums * weight[:, None], 0) / total
    tl.store(out + head * DIM + lane, summed.to(tl.bfloat16), mask=lane < DIM)
