"""Attention of one row to stored keys and values: sums of parts of the tokens, and the parts added up."""

from __future__ import annotations

import triton
import triton.language as tl

from edgemoe.kernels.triton.kv_rows import load_rows, load_tile, turn

STATE, PLACE = 2, 3
"""int64 numbers of a token: its position and id. Then for each layer: the addresses of the first head's row of token 0
in keys and in values, or where it would be if rows have moved, and the number of rows from one head to the next.
"""

_STATE, _PLACE = tl.constexpr(STATE), tl.constexpr(PLACE)


@triton.jit
def attend(
    queries,
    state,
    scratch,
    layer,
    scaling,
    window,
    GROUP: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    VALUE: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """The sums of a part of the tokens, with their largest score and the sum of their weights.

    A program takes PADDED of the GROUP heads that share a head of keys; there are BLOCKS such programs for each part.

    Args:
        queries: bf16 or float32 [heads, K.size].
        state: int64, as STATE and PLACE say.
        scratch: float32, the parts of all heads.
        layer: The layer's place in the state.
        scaling: Factor of the scores.
        window: Latest tokens that the row attends to; 0: all.
        K, V: RowForm of the rows that keys and that values are read from.
        VALUE: Size of a value.
        K0, K1, V0, V1: Columns of the tiles of a row of keys and of values.
        LATENT: Whether values are the first numbers of keys.
        TOKENS: Tokens that a program loads at a time.
        OPERAND: The type that tl.dot multiplies.
    """
    kv_head, part = tl.program_id(0) // BLOCKS, tl.program_id(1)
    group = tl.program_id(0) % BLOCKS * PADDED + tl.arange(0, PADDED)
    known = group < GROUP
    end, place = tl.load(state) + 1, state + _STATE + _PLACE * layer
    first = tl.maximum(end - window, 0)
    if window == 0:
        first = first * 0
    each = tl.cdiv(tl.cdiv(end - first, SPLITS), TOKENS) * TOKENS
    low = first + part * each
    high = tl.minimum(low + each, end)
    query = queries + (kv_head * GROUP + group)[:, None] * K.size
    k0, v0 = tl.arange(0, K0), tl.arange(0, V0)
    q0 = tl.load(query + k0[None, :], mask=known[:, None] & (k0 < K.size)[None, :], other=0).to(OPERAND)
    if K1 > 0:
        k1 = K0 + tl.arange(0, K1)
        q1 = tl.load(query + k1[None, :], mask=known[:, None] & (k1 < K.size)[None, :], other=0).to(OPERAND)
    base, keys = kv_head * tl.load(place + 2), tl.load(place)
    values = keys if LATENT else tl.load(place + 1)
    most = tl.full((PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    s0 = tl.zeros((PADDED, V0), tl.float32)
    if V1 > 0:
        v1 = V0 + tl.arange(0, V1)
        s1 = tl.zeros((PADDED, V1), tl.float32)
    token = tl.arange(0, TOKENS)
    for start in range(low, high, TOKENS):
        valid = start + token < high
        row = base + start + token
        key = load_tile(keys, row, valid, 0, K0, K).to(OPERAND)
        scores = tl.dot(q0, key)
        if K1 > 0:
            rest = load_tile(keys, row, valid, K0, K1, K).to(OPERAND)
            scores = tl.dot(q1, rest, scores)
        scores = tl.where(valid[None, :], scores * (scaling * 1.4426950408889634), float("-inf"))
        highest = tl.maximum(most, tl.max(scores, 1))
        weights, shrink = tl.exp2(scores - highest[:, None]), tl.exp2(most - highest)
        total = total * shrink + tl.sum(weights, 1)
        weights = weights.to(tl.bfloat16).to(OPERAND)
        if LATENT and (V0 == K0 and VALUE == V0):
            value = tl.trans(key)
        else:
            value = load_rows(values, row, valid, 0, V0, V).to(OPERAND)
        s0 = s0 * shrink[:, None] + tl.dot(weights, value)
        if V1 > 0:
            after = load_rows(values, row, valid, V0, V1, V).to(OPERAND)
            s1 = s1 * shrink[:, None] + tl.dot(weights, after)
        most = highest
    at = (kv_head * SPLITS + part) * GROUP + group
    into = scratch + at[:, None] * VALUE
    tl.store(into + v0[None, :], s0, mask=known[:, None] & (v0 < VALUE)[None, :])
    if V1 > 0:
        tl.store(into + v1[None, :], s1, mask=known[:, None] & (v1 < VALUE)[None, :])
    largest = scratch + KV_HEADS * SPLITS * GROUP * VALUE
    tl.store(largest + at, most, mask=known)
    tl.store(largest + KV_HEADS * SPLITS * GROUP + at, total, mask=known)


@triton.jit
def combine(
    scratch,
    sinks,
    out,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """COLUMNS numbers of a head's output from the parts of `attend`; sinks: float [heads] or None.

    The output is turned back where values are stored after a Hadamard rotation of 2^STEPS numbers.
    """
    head = tl.program_id(0)
    part, lane = tl.arange(0, SPLITS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = (head // GROUP * SPLITS + part) * GROUP + head % GROUP
    largest = scratch + KV_HEADS * SPLITS * GROUP * VALUE
    most = tl.load(largest + row)
    highest = tl.max(most, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(most - highest)
    total = tl.sum(weight * tl.load(largest + KV_HEADS * SPLITS * GROUP + row), 0)
    if sinks is not None:
        total += tl.exp2(sink - highest)
    sums = tl.load(scratch + row[:, None] * VALUE + lane[None, :], mask=(lane < VALUE)[None, :], other=0)
    summed = tl.sum(sums * weight[:, None], 0) / total
    if STEPS > 0:
        summed = turn(summed, COLUMNS, STEPS)
    tl.store(out + head * VALUE + lane, summed.to(tl.bfloat16), mask=lane < VALUE)
