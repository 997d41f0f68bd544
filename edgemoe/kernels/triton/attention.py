"""Grouped-query attention of one new token over a preallocated KV, by kernels that a graph can hold.

What changes from token to token lies in device memory (`STATE`, `PLACE`): the token's position and where its sequence's
keys and values are in each layer. So a graph captured once serves every position and every sequence. Keys and values
are split over programs, whose parts a second kernel adds up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.attend import PLACE, STATE, attend, combine
from edgemoe.kernels.triton.kv_rows import SMALLEST, RowForm
from edgemoe.kernels.triton.products import OPTIONS
from edgemoe.kernels.triton.store_kv import rotate, store, turn_heads
from edgemoe.kv.formats import KVFormat

__all__ = ["PLACE", "STATE", "RowAttention", "StoredRowAttention", "scratch_size"]

SPLITS, MOST = 16, 4
"""Parts that keys and values are split into, and how many times as many at most: few heads make few programs."""

_MOST_TOKENS, _TILE = 64, 1 << 13
"""Tokens that a program of `attend` loads at a time, at most, and numbers of its tile."""

_COLUMNS = 128
"""Numbers of a head's output per program of `combine`."""

_INTERPRETED = bool(triton.knobs.runtime.interpret)

_ROUNDED: dict[str, Any] = OPTIONS | {"enable_fp_fusion": False}
"""Options of kernels that write keys: fused to a bf16 multiply-add, the products of a rotation would not be rounded as
transformers rounds them.
"""


@dataclass(frozen=True)
class StoredRowAttention:
    """Attention of one layer to the keys and values of a sequence, and the KV's next row.

    Args:
        heads: Number of heads of queries, a multiple of kv_heads.
        kv_heads: Number of heads of keys and values.
        dim: Size of a key, and of a query.
        value_dim: Size of a value.
        scaling: Factor of the scores.
        window: Latest tokens that a row attends to, itself included; 0: all.
        sinks: Float [heads], one more score per head in the softmax, on the device; None: none.
        layer: The layer's place in the state (SequencePlaces).
        form: How keys and values are stored.
        latent: Leading numbers of a key that are its value, so that values are not stored, and value_dim is `latent`;
            0: values are stored.
    """

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    scaling: float
    window: int
    sinks: torch.Tensor | None
    layer: int
    form: KVFormat = field(default_factory=KVFormat)
    latent: int = 0

    def store(self, k: torch.Tensor, v: torch.Tensor, state: torch.Tensor) -> None:
        """Launches the write of the sequence's next row of keys and values.

        Args:
            k: bf16 [kv_heads, dim], rotated, contiguous; with latents the latent, [latent].
            v: bf16 [kv_heads, value_dim], contiguous; with latents the rotary part of the key, [dim - latent].
            state: int64 [STATE + PLACE * layers].
        """
        key, value = self.keys, self.values
        store[(self.kv_heads, 1 if self.latent else 2)](
            *(k, v, state, self.layer, self.latent, key, value),
            **_ROUNDED,
        )

    def attend(self, q: torch.Tensor, state: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor) -> None:
        """Launches the attention to all stored entries within the window, the sequence's next row included.

        Args:
            q: bf16 [heads, dim], rotated, contiguous.
            state: int64 [STATE + PLACE * layers].
            scratch: float32, at least scratch_size(heads, dim).
            out: bf16 [heads, value_dim], contiguous, the result.
        """
        key, value = self.keys, self.values
        if key.turned:
            turned = scratch[self._parts :]
            turn_heads[(self.heads,)](q, turned, key.size, key.padded, key.steps, **_ROUNDED)
            q = turned
        group, padded, blocks = self._groups
        attend[(self.kv_heads * blocks, self.splits)](
            *(q, state, scratch, self.layer, self.scaling, self.window),
            *(group, blocks, padded, self.kv_heads, key, key if self.latent else value, self.value_dim),
            *(*key.tiles, *value.tiles, bool(self.latent), self.splits, self._tokens),
            tl.float32 if _INTERPRETED else tl.bfloat16,
            **self._schedule,
            **OPTIONS,
        )
        steps = key.steps if self.latent else 0
        columns = min(max(_COLUMNS, key.turned), triton.next_power_of_2(self.value_dim))
        combine[(self.heads, triton.cdiv(self.value_dim, columns))](
            *(scratch, self.sinks, out, group, self.kv_heads, self.value_dim, columns, self.splits, steps),
            num_warps=max(columns * self.splits // 2048, 1),
            **OPTIONS,
        )

    @cached_property
    def keys(self) -> RowForm:
        """Form of a stored key."""
        return RowForm(self.dim, self.form.keys, self.form.rotation(self.dim, self.latent or self.dim))

    @cached_property
    def values(self) -> RowForm:
        """Form of a stored value."""
        return RowForm(self.value_dim, self.form.values)

    @cached_property
    def splits(self) -> int:
        """Parts that the tokens are split into: more where few heads of keys make few programs."""
        splits: int = triton.next_power_of_2(triton.cdiv(MOST * SPLITS, self.kv_heads * self._groups[2]))
        return min(max(splits, SPLITS), MOST * SPLITS)

    @property
    def _groups(self) -> tuple[int, int, int]:
        """Heads per head of keys, heads per program, and programs that share a head of keys and a part."""
        group = self.heads // self.kv_heads
        return group, SMALLEST, triton.cdiv(group, SMALLEST)

    @property
    def _tokens(self) -> int:
        """Tokens that a program of `attend` loads at a time: a tile has at most _TILE numbers."""
        largest = max(sum(self.keys.tiles), sum(self.values.tiles))
        padded: int = triton.next_power_of_2(largest)
        return min(max(_TILE // padded, SMALLEST), _MOST_TOKENS)

    @property
    def _schedule(self) -> dict[str, int]:
        """Warps and stages of `attend`, which fit 99 KiB of shared memory and the registers without spills."""
        large = sum(self.keys.tiles) > (128 if self.form.quantized else 256)
        return {"num_warps": 8, "num_stages": 2} if large else {"num_warps": 4, "num_stages": 3}

    @property
    def _parts(self) -> int:
        """float32 numbers of scratch memory before the turned queries."""
        return self.heads * self.splits * (self.value_dim + 2)


@dataclass(frozen=True)
class RowAttention:
    """Attention of one layer from the products of queries, keys and values on: norms, rotation, KV and attention.

    Args:
        heads, kv_heads: Numbers of heads of queries, and of keys and values.
        dim: Size of a head, even.
        norms: Weight, bf16, and epsilon of the queries' norm and of the keys' norm; None: no norms. A weight has the
            size of one head or of all heads together.
        scaling: Factor of the scores.
        window: Latest tokens that a row attends to, itself included; 0: all.
        layer: The layer's place in the state (SequencePlaces).
        rotated: Leading numbers of a head that positions rotate, an even number; 0: all.
        sinks: As in StoredRowAttention.
        form: How keys and values are stored.
    """

    heads: int
    kv_heads: int
    dim: int
    norms: tuple[tuple[torch.Tensor, float], tuple[torch.Tensor, float]] | None
    scaling: float
    window: int
    layer: int
    rotated: int = 0
    sinks: torch.Tensor | None = None
    form: KVFormat = field(default_factory=KVFormat)

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
            rotation: cosine and sine, bf16 [rotated], or [dim] where all numbers are rotated.
            state: int64 [STATE + PLACE * layers].
            queries: bf16 [heads dim], scratch.
            scratch: float32, at least scratch_size(heads, dim).
            out: bf16 [heads dim].
        """
        (q, q_epsilon), (k, k_epsilon) = self.norms or ((None, 0.0), (None, 0.0))
        spans = (0 if norm is None else norm.numel() for norm in (q, k))
        key, value = self.stored.keys, self.stored.values
        rotate[(self.heads + 2 * self.kv_heads,)](
            *(qkv, q, k, q_epsilon, k_epsilon, *rotation, state, queries, self.layer),
            *(self.heads, self.kv_heads, self.rotated or self.dim, *spans, key, value),
            **_ROUNDED,
        )
        self.stored.attend(queries, state, scratch, out)

    @cached_property
    def stored(self) -> StoredRowAttention:
        """The attention to what is stored."""
        shape = self.heads, self.kv_heads, self.dim, self.dim
        return StoredRowAttention(*shape, self.scaling, self.window, self.sinks, self.layer, self.form)


def scratch_size(heads: int, dim: int) -> int:
    """float32 numbers of scratch memory: each part's sums, largest score and sum of weights, and a copy of queries.

    Args:
        heads: Heads of queries.
        dim: Size of a key or of a value, the larger one.
    """
    return heads * (MOST * SPLITS * (dim + 2) + dim)
