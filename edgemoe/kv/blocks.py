"""Blocks of a sequence's tokens: the unit in which its KV takes memory, and in which equal beginnings are found."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

BLOCK = 256
"""Tokens of a block."""

BLOCK_ROWS = 2 * BLOCK
"""Token rows that a layer's parts, except its experts, compute at a time. Fixed, so that an answer does not depend on
the number of rows in a step of its prompt."""

Tokens = npt.NDArray[np.int64]


def whole_blocks(tokens: int, context: int) -> int:
    """Returns the tokens of the blocks that hold `tokens`, at most the context.

    >>> whole_blocks(0, 1000), whole_blocks(1, 1000), whole_blocks(257, 1000), whole_blocks(900, 1000)
    (0, 256, 512, 1000)
    """
    return min(-(-tokens // BLOCK) * BLOCK, context)


def window_digest(digest: bytes) -> bytes:
    """Names the rows of a block in layers with a window, by the block's hash."""
    return xxhash.xxh3_128_digest(b"window" + digest)


def chain(root: bytes, tokens: Tokens) -> list[bytes]:
    """Returns the hash of every beginning of `tokens` that ends with a block: of none, one, two, ... blocks.

    Each hash covers the hash before it and its block's tokens. Equal hashes are no proof of equal tokens.

    >>> one, two = chain(b"root", np.arange(300)), chain(b"root", np.arange(600))
    >>> len(one), len(two), one == two[:2]
    (2, 3, True)

    Args:
        root: the hash of no tokens, which covers all that their KV depends on except tokens.
        tokens: int64 [n].
    """
    hashes = [root]
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        block = np.ascontiguousarray(tokens[end - BLOCK : end], "<i8")
        hashes.append(xxhash.xxh3_128_digest(hashes[-1] + block.tobytes()))
    return hashes
