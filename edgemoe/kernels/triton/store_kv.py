"""The next row of a sequence's keys and values: norms, rotation, and the write at the places of a token's state."""

from __future__ import annotations

import triton
import triton.language as tl

from edgemoe.kernels.triton.attend import PLACE, STATE
from edgemoe.kernels.triton.kv_rows import store_row, turn

_STATE, _PLACE = tl.constexpr(STATE), tl.constexpr(PLACE)


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
    ROTATED: tl.constexpr,
    Q_SPAN: tl.constexpr,
    K_SPAN: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Normalises and rotates a head of queries or keys; a program takes a head. Keys and values go into the KV."""
    head = tl.program_id(0)
    DIM: tl.constexpr = K.size
    PADDED: tl.constexpr = K.padded
    lane = tl.arange(0, PADDED)
    inside = lane < DIM
    if head < HEADS:
        row = _rotated(qkv, q_norm, q_epsilon, cosine, sine, head, lane, DIM, ROTATED, Q_SPAN)
        tl.store(queries + head * DIM + lane, row, mask=inside)
    else:
        place = state + _STATE + _PLACE * layer
        at = (head - HEADS) % KV_HEADS * tl.load(place + 2) + tl.load(state)
        if head < HEADS + KV_HEADS:
            first, own = qkv + HEADS * DIM, head - HEADS
            row = _rotated(first, k_norm, k_epsilon, cosine, sine, own, lane, DIM, ROTATED, K_SPAN)
            store_row(tl.load(place), at, row, K)
        else:
            value = tl.load(qkv + head * DIM + lane, mask=inside, other=0)
            store_row(tl.load(place + 1), at, value, V)


@triton.jit
def _rotated(
    x,
    norm,
    epsilon,
    cosine,
    sine,
    head,
    lane,
    DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    SPAN: tl.constexpr,
):
    """bf16: a head of x, normalised over SPAN elements (0: not), and its first ROTATED numbers rotated by halves."""
    HALF: tl.constexpr = ROTATED // 2
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
    cos = tl.load(cosine + lane, mask=lane < ROTATED, other=1).to(tl.float32)
    sin = tl.load(sine + lane, mask=lane < ROTATED, other=0).to(tl.float32)
    turned = (tl.where(lane < HALF, -pair, pair) * sin).to(tl.bfloat16).to(tl.float32)
    return ((own * cos).to(tl.bfloat16).to(tl.float32) + turned).to(tl.bfloat16)


@triton.jit
def _weighted(scaled, weight, inside):
    """float32 of bf16: scaled, rounded, times the norm's weight, rounded."""
    weights = tl.load(weight, mask=inside, other=0).to(tl.float32)
    return (scaled.to(tl.bfloat16).to(tl.float32) * weights).to(tl.bfloat16).to(tl.float32)


@triton.jit
def store(k, v, state, layer, LATENT: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Stores a head's next key, or its value; with latents, the latent k and the rotary part v as one key."""
    head, place = tl.program_id(0), state + _STATE + _PLACE * layer
    at = head * tl.load(place + 2) + tl.load(state)
    if tl.program_id(1) == 0:
        key = _joined(k + head * K.size, v, LATENT, K.size, K.padded)
        store_row(tl.load(place), at, key, K)
    else:
        value = _joined(v + head * V.size, v, 0, V.size, V.padded)
        store_row(tl.load(place + 1), at, value, V)


@triton.jit
def _joined(x, rest, FIRST: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """[PADDED]: SIZE numbers of x, or FIRST numbers of x and then the others of `rest`; FIRST 0: all of x."""
    lane = tl.arange(0, PADDED)
    if FIRST > 0:
        after = tl.load(rest + (lane - FIRST), mask=(lane >= FIRST) & (lane < SIZE), other=0)
        row = tl.where(lane < FIRST, tl.load(x + lane, mask=lane < FIRST, other=0), after)
    else:
        row = tl.load(x + lane, mask=lane < SIZE, other=0)
    return row


@triton.jit
def turn_heads(x, out, SIZE: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr):
    """float32 out [heads, SIZE] = the Hadamard rotation of bf16 x, a program per head."""
    lane, head = tl.arange(0, PADDED), tl.program_id(0)
    row = tl.load(x + head * SIZE + lane, mask=lane < SIZE, other=0)
    tl.store(out + head * SIZE + lane, turn(row, PADDED, STEPS), mask=lane < SIZE)
