"""The shape of a sequence's KV: keys and values, latents, and the state of linear-attention layers."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

from edgemoe.kv.formats import KVFormat, row_bytes

PAGE = mmap.PAGESIZE
"""Bytes of memory that are taken at once."""


@dataclass(frozen=True)
class LinearState:
    """The shape of the state of linear-attention layers and their kind, which does not depend on a sequence's length.

    Args:
        layers: the layers with such a state, ascending.
        channels, kernel: of the convolution, whose last inputs are stored as bf16 [channels, kernel].
        heads, key_dim, value_dim: shape of the recurrence's state, float32 [heads, key_dim, value_dim]; 0: none.
    """

    layers: tuple[int, ...]
    channels: int
    kernel: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def bytes(self) -> int:
        """Bytes of all layers' states in two copies: a step writes one, so that the other can undo the step."""
        each = 2 * self.channels * self.kernel + 4 * self.heads * self.key_dim * self.value_dim
        return 2 * len(self.layers) * each


@dataclass(frozen=True)
class KVShape:
    """The shape of one sequence's KV.

    Args:
        layers: the layers with attention, ascending.
        heads: number of key and value heads.
        key_dim: size of a key.
        value_dim: size of a value; 0 where values are not stored.
        latent: leading elements of a key that are the latent of its value (multi-head latent attention); 0: none.
        linear: state of the linear-attention layers; None: there are none.
        format: how keys and values are stored; latents are stored as keys.
    """

    layers: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int
    latent: int = 0
    linear: LinearState | None = None
    format: KVFormat = field(default_factory=KVFormat)

    @property
    def rotation(self) -> int:
        """Numbers of a key that are rotated together (KVFormat.rotation); 0: keys lie plain."""
        return self.format.rotation(self.key_dim, self.latent or self.key_dim)

    def bytes_for(self, context: int) -> int:
        """Returns the bytes of a sequence's KV for `context` tokens."""
        row = row_bytes(self.format.keys, self.key_dim) + row_bytes(self.format.values, self.value_dim)
        return len(self.layers) * self.heads * row * context + (self.linear.bytes if self.linear else 0)

    def bytes_in_pages(self, tokens: int, context: int) -> int:
        """Returns the bytes of the pages that a sequence's first tokens lie in, where its context has been mapped.

        Keys and values of each layer and head lie together, for all tokens of the context.

        Args:
            tokens: at most the context.
            context: tokens that the sequence may have.
        """
        rows = [row_bytes(self.format.keys, self.key_dim)]
        rows += [row_bytes(self.format.values, self.value_dim)] if self.value_dim else []
        pages = sum(-(-tokens * row // PAGE) + (context * row % PAGE > 0) for row in rows if tokens)
        in_pages = len(self.layers) * self.heads * pages * PAGE + (self.linear.bytes if self.linear else 0)
        return min(in_pages, self.bytes_for(context))
