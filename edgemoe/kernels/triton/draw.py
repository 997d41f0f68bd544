"""The draw of a token by kernels that a graph can hold, as policy.drawing.DrawRule defines it, bit for bit.

    count     logits ─► how many tokens have each value of bf16, and the largest logit
    weigh     values ─► sums of tokens and of weights of 1,024 values each
    point     sums, random number ─► the value of the drawn token, and how many tokens of this value precede it
    match     logits ─► how many tokens of each part have the value; the counts become 0 again
    take      the token's id, and the state of the next token

All values of bf16 are a table of 65,536 counts, from the largest value down. So nothing is sorted: tokens with the same
value have the same weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.products import OPTIONS
from edgemoe.kernels.triton.token import parts_of
from edgemoe.policy.drawing import FARTHEST, FRACTION, HIGHEST, LONGEST, UNIT

VALUES = 1 << 16
"""Values of bf16."""

SPAN = 1024
"""Values whose weights a program of `weigh` sums."""

NUMBERS = 256
"""Random numbers that the device has at once."""

RULE = 5
"""Numbers of a rule: the position whose token takes the first random number, then scale, top_k, mass and least."""

_SPAN = tl.constexpr(SPAN)
_VALUES = tl.constexpr(VALUES)
_SPANS = tl.constexpr(VALUES // SPAN)
_RULE = tl.constexpr(RULE)
_NUMBERS = tl.constexpr(NUMBERS)
_UNIT = tl.constexpr(UNIT)
_ONE = tl.constexpr(1 << UNIT)
_FRACTION = tl.constexpr(FRACTION)
_FARTHEST = tl.constexpr(FARTHEST)
_LONGEST = tl.constexpr(LONGEST)
_TURN = tl.constexpr(60 - HIGHEST)


class DrawTables(NamedTuple):
    """Tensors of a draw on the device.

    Attributes:
        rule: int64 [RULE + NUMBERS], the rule and the random numbers.
        powers: int64 [2, 256], policy.drawing.powers.
        counts: int32 [VALUES], zeros before and after a draw.
        sums: int64 [3, VALUES / SPAN], scratch: tokens, weights, and weights that are not below `least`.
        pointed: int64 [2], scratch: the place of the drawn value in `counts`, and the tokens that precede.
        matches: int32 [parts_of(vocab)], scratch.
    """

    rule: torch.Tensor
    powers: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor
    pointed: torch.Tensor
    matches: torch.Tensor


def draw_token(
    logits: torch.Tensor,
    highest: torch.Tensor,
    numbers: torch.Tensor,
    result: torch.Tensor,
    state: torch.Tensor,
    tables: DrawTables,
) -> None:
    """Launches the conversion of logits, the draw of a token, and the step to the next position.

    With a NaN any token may be drawn.

    Args:
        logits: bf16 [V], contiguous; a float32 is taken as the bf16 that its upper half is.
        highest: float32 [parts_of(V)], scratch.
        numbers: float32 [V], written: the logits.
        result: int32 [1 or more], written: the token.
        state: int64 [2 or more]: the position, which grows by 1, and the token, which becomes the drawn one.
        tables: tensors of the draw.
    """
    from edgemoe.kernels.triton.token import BLOCK

    vocab = len(logits)
    parts = parts_of(vocab)
    padded = triton.next_power_of_2(parts)
    rule, powers, counts, sums, pointed, matches = tables
    count[(parts,)](logits, numbers, highest, counts, vocab, BLOCK, **OPTIONS)
    weigh[(VALUES // SPAN,)](counts, highest, rule, powers, sums, parts, padded, **OPTIONS)
    point[(1,)](counts, highest, rule, powers, sums, state, pointed, parts, padded, **OPTIONS)
    match[(parts,)](numbers, pointed, counts, matches, vocab, BLOCK, **OPTIONS)
    take[(1,)](numbers, pointed, matches, result, state, vocab, parts, padded, BLOCK, **OPTIONS)


@triton.jit
def place_of(logit):
    """The place of a logit's value in the table: 0 is the largest one."""
    # -0 is 0 + -0, so that it has the place of 0.
    bits = ((logit + 0.0).to(tl.int32, bitcast=True) >> 16) & 0xFFFF
    return tl.where(bits >= 0x8000, bits, 0x7FFF - bits)


@triton.jit
def value_at(place):
    """The value whose place is given, float32."""
    bits = tl.where(place >= 0x8000, place, 0x7FFF - place)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def weights_at(place, top, rule, powers):
    """Weights of the values at some places, int64; `top` is the largest logit."""
    scale = tl.load(rule + 1).to(tl.int32).to(tl.float32, bitcast=True)
    # Values that are not finite stand for no token, or for a forbidden one.
    value = value_at(place)
    finite = tl.abs(value) < float("inf")
    below = tl.minimum(tl.maximum(top - tl.where(finite, value, 0.0), 0.0), _FARTHEST)
    steps = tl.where(finite, tl.minimum(below * scale, _LONGEST), _LONGEST).to(tl.int32)
    coarse = tl.load(powers + (steps >> 8 & 255))
    fine = tl.load(powers + 256 + (steps & 255))
    return coarse * fine >> ((steps >> _FRACTION) + _TURN).to(tl.int64)


@triton.jit
def largest(highest, parts, PARTS: tl.constexpr):
    """The largest logit."""
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(highest + part, mask=part < parts, other=float("-inf")), 0)


@triton.jit
def count(logits, numbers, highest, counts, vocab, BLOCK: tl.constexpr):
    """A program counts the values of BLOCK logits: see draw_token."""
    part = tl.program_id(0)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    own = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    tl.store(numbers + token, own, mask=inside)
    tl.store(highest + part, tl.max(own, 0))
    tl.atomic_add(counts + place_of(own), 1, mask=inside, sem="relaxed")


@triton.jit
def weigh(counts, highest, rule, powers, sums, parts, PARTS: tl.constexpr):
    """A program sums the tokens and the weights of SPAN values: see DrawTables."""
    span = tl.program_id(0)
    place = span * _SPAN + tl.arange(0, _SPAN)
    tokens = tl.load(counts + place).to(tl.int64)
    weight = weights_at(place, largest(highest, parts, PARTS), rule, powers)
    together = tl.where(tokens > 0, tokens * weight, 0)
    tl.store(sums + span, tl.sum(tokens, 0))
    tl.store(sums + _SPANS + span, tl.sum(together, 0))
    tl.store(sums + 2 * _SPANS + span, tl.sum(tl.where(weight >= tl.load(rule + 4), together, 0), 0))


@triton.jit
def place_reaching(bound, counts, sums, top, rule, powers, BY_WEIGHT: tl.constexpr):
    """The first value up to which tokens, or their weights, sum to a bound of 1 or more.

    Returns:
        its place, the weight of one of its tokens, and the weights of all values before it; int64.
    """
    span = tl.arange(0, _SPANS)
    masses = tl.load(sums + _SPANS + span)
    ends = tl.cumsum(masses if BY_WEIGHT else tl.load(sums + span), 0)
    at = tl.minimum(tl.sum((ends < bound).to(tl.int32), 0), _SPANS - 1)
    before = tl.sum(tl.where(span < at, masses, 0), 0)
    place = at * _SPAN + tl.arange(0, _SPAN)
    tokens = tl.load(counts + place).to(tl.int64)
    weight = weights_at(place, top, rule, powers)
    together = tl.where(tokens > 0, tokens * weight, 0)
    if BY_WEIGHT:
        reached = before + tl.cumsum(together, 0)
    else:
        earlier = tl.sum(tl.where(span < at, tl.load(sums + span), 0), 0)
        reached = earlier + tl.cumsum(tokens, 0)
    first = at * _SPAN + tl.minimum(tl.sum((reached < bound).to(tl.int32), 0), _SPAN - 1)
    before += tl.sum(tl.where(place < first, together, 0), 0)
    return first, tl.sum(tl.where(place == first, weight, 0), 0), before


@triton.jit
def part_of(total, number):
    """Total times number / 2**31, rounded down, where the product has more than 64 bits."""
    upper = (total >> _UNIT) * number
    return upper + ((total & (_ONE - 1)) * number >> _UNIT)


@triton.jit
def point(counts, highest, rule, powers, sums, state, pointed, parts, PARTS: tl.constexpr):
    """One program: the value of the drawn token, and the tokens of this value before it."""
    top = largest(highest, parts, PARTS)
    span = tl.arange(0, _SPANS)
    total = tl.sum(tl.load(sums + _SPANS + span), 0)
    above = tl.sum(tl.load(sums + 2 * _SPANS + span), 0)
    top_k, mass = tl.load(rule + 2), tl.load(rule + 3)
    if top_k > 0:
        bound = tl.minimum(top_k, tl.sum(tl.load(sums + span), 0))
        last, weight, before = place_reaching(bound, counts, sums, top, rule, powers, False)
        total = before + weight * tl.load(counts + last).to(tl.int64)
    # Rounded up: the total less the part of it that is left out.
    bound = tl.maximum(total - part_of(total, _ONE - mass), 1)
    last, weight, before = place_reaching(bound, counts, sums, top, rule, powers, True)
    weight = tl.maximum(weight, 1)
    left = before + (bound - before + weight - 1) // weight * weight
    position = tl.load(state) - tl.load(rule)
    number = tl.load(rule + _RULE + (position & (_NUMBERS - 1)))
    drawn = part_of(tl.minimum(left, above), number)
    last, weight, before = place_reaching(drawn + 1, counts, sums, top, rule, powers, True)
    tl.store(pointed, last.to(tl.int64))
    tl.store(pointed + 1, (drawn - before) // tl.maximum(weight, 1))


@triton.jit
def match(numbers, pointed, counts, matches, vocab, BLOCK: tl.constexpr):
    """A program counts the tokens of a part with the drawn value, and clears its share of the counts."""
    part = tl.program_id(0)
    token = part * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(numbers + token, mask=token < vocab, other=0)
    equal = tl.where(token < vocab, place_of(own) == tl.load(pointed), False)
    tl.store(matches + part, tl.sum(equal.to(tl.int32), 0))
    for start in range(part * _SPAN, _VALUES, tl.num_programs(0) * _SPAN):
        tl.store(counts + start + tl.arange(0, _SPAN), tl.zeros((_SPAN,), tl.int32))


@triton.jit
def take(numbers, pointed, matches, result, state, vocab, parts, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the id of the drawn token, and the state of the next one."""
    part = tl.arange(0, PARTS)
    found = tl.load(matches + part, mask=part < parts, other=0)
    earlier = tl.load(pointed + 1)
    at = tl.minimum(tl.sum((tl.cumsum(found, 0) <= earlier).to(tl.int32), 0), parts - 1)
    rest = earlier - tl.sum(tl.where(part < at, found, 0), 0)
    token = at * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(numbers + token, mask=token < vocab, other=0)
    equal = tl.where(token < vocab, place_of(own) == tl.load(pointed), False)
    drawn = tl.where(equal, tl.where(tl.cumsum(equal.to(tl.int32), 0) == rest + 1, token, vocab), vocab)
    # With a NaN there may be no such token.
    first = tl.minimum(tl.min(drawn, 0), vocab - 1)
    tl.store(result, first)
    tl.store(state, tl.load(state) + 1)
    tl.store(state + 1, first.to(tl.int64))
