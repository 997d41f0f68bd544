"""Beginning and end of a new token, by kernels that a graph can hold: its embedding, and its likeliest successor.

The end writes the likeliest token and the next position to where the beginning reads them: the same launches compute
the next token without the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.products import OPTIONS
from edgemoe.storage.store.dense_shapes import bits_of

BLOCK = 4096
"""Logits per program of `compare`."""


def parts_of(vocab: int) -> int:
    """Number of parts into which `choose_likeliest` divides the logits.

    >>> parts_of(151_936)
    38
    """
    return int(triton.cdiv(vocab, BLOCK))


def embed(
    token: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, hidden: torch.Tensor
) -> None:
    """Launches the look-up of a token's row, to the bits of layers.embedding.DenseEmbedding.

    Args:
        token: int64 [1], below V.
        weight: bf16 [V, H], int8 [V, H] with the scale, or uint8 of 4 to 6 bits (storage.store.dense_groups);
            contiguous.
        scale: bf16 [V]; None: the weight is not int8.
        hidden: bf16 [H], written.
    """
    size = hidden.numel()
    if weight.dtype == torch.uint8:
        bits = bits_of(tuple(weight.shape))
        block = min(BLOCK, 1024)
        grid = (triton.cdiv(size, block),)
        options = OPTIONS | {"enable_fp_fusion": False}  # torch rounds products before it adds the centres
        look_up_groups[grid](token, weight, hidden, len(weight), size, bits, block, **options)
        return
    look_up[(triton.cdiv(size, BLOCK),)](token, weight, scale, hidden, size, BLOCK, **OPTIONS)


def choose_likeliest(
    logits: torch.Tensor,
    highest: torch.Tensor,
    numbers: torch.Tensor,
    likeliest: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Launches the conversion of logits, the choice of the likeliest token, and the step to the next position.

    Of equal logits the first is the likeliest, as for torch.argmax. With a NaN any token may be.

    Args:
        logits: bf16 [V], contiguous.
        highest: float32 [parts_of(V)], scratch.
        numbers: float32 [V], written: the logits.
        likeliest: int32 [1 + parts_of(V)], written: the likeliest token, then scratch.
        state: int64 [2 or more]: the position, which grows by 1, and the token, which becomes the likeliest.
    """
    vocab = len(logits)
    parts = parts_of(vocab)
    compare[(parts,)](logits, numbers, highest, likeliest, vocab, BLOCK, **OPTIONS)
    advance[(1,)](highest, likeliest, state, parts, triton.next_power_of_2(parts), num_warps=1, **OPTIONS)


@triton.jit
def look_up(token, weight, scale, hidden, size, BLOCK: tl.constexpr):
    """A program writes BLOCK elements: see embed."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    row = tl.load(token)
    numbers = tl.load(weight + row * size + at, mask=inside, other=0).to(tl.float32)
    if scale is not None:
        numbers *= tl.load(scale + row).to(tl.float32)
    tl.store(hidden + at, numbers.to(tl.bfloat16), mask=inside)


@triton.jit
def look_up_groups(token, weight, hidden, count, size, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """A program writes BLOCK elements of a row of `count` rows in groups: see embed."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, row, weights = at < size, tl.load(token), count.to(tl.int64) * size
    block, within, four = row // 32 * size, row % 32, at // 4
    pair = tl.load(weight.to(tl.pointer_type(tl.uint32)) + at // 64 * count + row, mask=inside, other=0)
    base = weight + weights // 16
    place, shift = block * 8 + four * 32 + at % 2 * 16 + within % 16, within // 16 * 4 + (at & 2)
    two = tl.load(base + place, mask=inside, other=0).to(tl.int32) >> shift
    next_two = tl.load(base + weights // 4 + place, mask=inside, other=0).to(tl.int32) >> shift
    codes = ((two & 3) << 2) | (next_two & 3)
    if BITS > 4:
        WIDTH: tl.constexpr = BITS - 4
        turn, later = (four, 0) if BITS == 6 else (four // 2, four % 2 * 4)
        place = block * 4 * WIDTH + turn * 32 + at % 2 * 16 + within % 8 * 2 + at % 4 // 2
        rest = tl.load(base + weights // 2 + place, mask=inside, other=0).to(tl.int32)
        codes = (codes << WIDTH) | ((rest >> (later + within // 8 * WIDTH)) & ((1 << WIDTH) - 1))
    UNIT: tl.constexpr = 1.0 if BITS == 4 else (0.5 if BITS == 5 else 0.25)
    ZERO: tl.constexpr = 8.0 if BITS == 4 else (8.25 if BITS == 5 else 8.375)
    scale = (pair << 16).to(tl.float32, bitcast=True)
    numbers = (codes.to(tl.float32) * UNIT - ZERO) * scale
    centre = (pair & 0xFFFF0000).to(tl.float32, bitcast=True)
    tl.store(hidden + at, (numbers + centre).to(tl.bfloat16), mask=inside)


@triton.jit
def compare(logits, numbers, highest, likeliest, vocab, BLOCK: tl.constexpr):
    """The largest logit of a part and the first token that has it: see choose_likeliest."""
    part = tl.program_id(0)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    own = tl.load(logits + token, mask=inside, other=float("-inf")).to(tl.float32)
    tl.store(numbers + token, own, mask=inside)
    most = tl.max(own, 0)
    first = tl.min(tl.where(own == most, token, vocab), 0)
    tl.store(highest + part, most)
    # With a NaN no logit may be the largest one: the token stays within the vocabulary.
    tl.store(likeliest + 1 + part, tl.minimum(first, vocab - 1))


@triton.jit
def advance(highest, likeliest, state, parts, PARTS: tl.constexpr):
    """One program: the first of the parts' largest logits, and the state of the next token."""
    part = tl.arange(0, PARTS)
    inside = part < parts
    own = tl.load(highest + part, mask=inside, other=float("-inf"))
    token = tl.load(likeliest + 1 + part, mask=inside, other=2147483647)
    best = tl.min(tl.where(own == tl.max(own, 0), token, 2147483647), 0)
    # Where no logit is the largest one, the last part's token, which is above all others.
    best = tl.minimum(best, tl.load(likeliest + parts))
    tl.store(likeliest, best)
    tl.store(state, tl.load(state) + 1)
    tl.store(state + 1, best.to(tl.int64))
