"""Beginning and end of a new token, by kernels that a graph can hold: its embedding, and its likeliest successor.

The end writes the likeliest token and the next position to where the beginning reads them: the same launches compute
the next token without the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.products import OPTIONS

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
    """Launches the look-up of a token's row, to the bits of layers.dense.DenseEmbedding.

    Args:
        token: int64 [1], below V.
        weight: bf16 [V, H], or int8 [V, H] with the scale; contiguous.
        scale: bf16 [V]; None: the weight is bf16.
        hidden: bf16 [H], written.
    """
    size = weight.shape[1]
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
