"""Multi-head latent attention of one row over cached latents (layers.mla), by kernels that a graph can hold.

Queries are multiplied by each head's key matrix, and the sums of latents by its value matrix, so that neither keys nor
values are expanded. Sums are float32 in a fixed order; results are rounded to bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
import triton
import triton.language as tl

from edgemoe.kernels.triton.attention import StoredRowAttention, scratch_size
from edgemoe.kernels.triton.products import OPTIONS
from edgemoe.kv.formats import KVFormat

_COLUMNS, _DEPTH, _ROWS = 128, 32, 8
"""Numbers of a latent per program of `to_latents`, rows that it loads at once, and rows per program of `to_values`."""


@dataclass(frozen=True)
class LatentRowAttention:
    """Attention of one layer to the latents of a sequence, and the KV's next row.

    Args:
        weight: bf16 or int8 [heads (key + value), latent], as kv_b_proj is stored, on the device.
        scale: bf16 [heads (key + value)]; None: the weight is bf16.
        heads: Number of heads.
        key: Size of the part of a query that is multiplied by a head's key matrix.
        rotary: Size of the rotary part.
        scaling: Factor of the scores.
        layer: The layer's place in the state (SequencePlaces).
        window: Latest tokens that a row attends to, itself included; 0: all.
        form: How latents are stored.
    """

    weight: torch.Tensor
    scale: torch.Tensor | None
    heads: int
    key: int
    rotary: int
    scaling: float
    layer: int
    window: int = 0
    form: KVFormat = field(default_factory=KVFormat)

    def store(self, latent: torch.Tensor, rotary: torch.Tensor, state: torch.Tensor) -> None:
        """Launches the write of the sequence's next row.

        Args:
            latent: bf16 [latent], normed, contiguous.
            rotary: bf16 [rotary], rotated, contiguous.
            state: int64 [STATE + PLACE * layers].
        """
        self.stored.store(latent, rotary, state)

    def attend(self, q: torch.Tensor, state: torch.Tensor, scratch: torch.Tensor, out: torch.Tensor) -> None:
        """Launches the products of queries, the attention and the products of its results.

        Args:
            q: bf16 [heads, key + rotary], the rotary part rotated, contiguous.
            state: int64 [STATE + PLACE * layers].
            scratch: float32 [scratch_size].
            out: bf16 [heads, value], contiguous, the result.
        """
        latent, each = self.weight.shape[1], len(self.weight) // self.heads
        start = scratch_size(self.heads, latent + self.rotary)
        own = scratch[start:].view(torch.bfloat16)
        queries, sums = own[: self.heads * (latent + self.rotary)], own[self.heads * (latent + self.rotary) :]
        to_latents[(self.heads, triton.cdiv(latent, _COLUMNS) + 1)](
            *(q, self.weight, self.scale, queries, each, self.key, self.rotary, latent),
            *(_COLUMNS, _DEPTH, triton.next_power_of_2(self.rotary)),
            **OPTIONS,
        )
        self.stored.attend(queries, state, scratch, sums)
        to_values[(self.heads, triton.cdiv(each - self.key, _ROWS))](
            *(sums, self.weight, self.scale, out, each, self.key, latent),
            *(_ROWS, triton.next_power_of_2(latent)),
            **OPTIONS,
        )

    @property
    def scratch_size(self) -> int:
        """float32 numbers of scratch memory: of the attention, and bf16 queries and sums in the form of latents."""
        size = self.weight.shape[1] + self.rotary
        return scratch_size(self.heads, size) + self.heads * size

    @cached_property
    def stored(self) -> StoredRowAttention:
        """The attention to what is stored."""
        latent = self.weight.shape[1]
        shape = self.heads, 1, latent + self.rotary, latent
        return StoredRowAttention(*shape, self.scaling, self.window, None, self.layer, self.form, latent)


@triton.jit
def to_latents(
    q,
    weight,
    scale,
    out,
    each,
    key,
    rotary,
    latent,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    ROTARY: tl.constexpr,
):
    """out [latent + rotary] of a head = its query times its key matrix, then the query's rotary part.

    A program computes COLUMNS numbers; a further one copies the rotary part. Arguments as in LatentRowAttention; `each`
    is the number of rows of a head's matrices.
    """
    head, block = tl.program_id(0), tl.program_id(1)
    query, into = q + head * (key + rotary), out + head * (latent + rotary)
    if block * COLUMNS < latent:
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        sums = tl.zeros((COLUMNS,), tl.float32)
        for start in range(0, key, DEPTH):
            row = start + tl.arange(0, DEPTH)
            numbers = tl.load(query + row, mask=row < key, other=0).to(tl.float32)
            at = head * each + row
            if scale is not None:
                numbers *= tl.load(scale + at, mask=row < key, other=0).to(tl.float32)
            mask = (row < key)[:, None] & (column < latent)[None, :]
            weights = tl.load(
                weight + at.to(tl.int64)[:, None] * latent + column[None, :], mask=mask, other=0
            )
            sums += tl.sum(weights.to(tl.float32) * numbers[:, None], 0)
        tl.store(into + column, sums.to(tl.bfloat16), mask=column < latent)
    else:
        lane = tl.arange(0, ROTARY)
        tail = tl.load(query + key + lane, mask=lane < rotary, other=0)
        tl.store(into + latent + lane, tail, mask=lane < rotary)


@triton.jit
def to_values(x, weight, scale, out, each, key, latent, ROWS: tl.constexpr, LATENT: tl.constexpr):
    """out [value] of a head = its value matrix times the head's sums of latents x; a program computes ROWS numbers."""
    head = tl.program_id(0)
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, LATENT)
    value = each - key
    at = head * each + key + row
    numbers = tl.load(x + head * latent + column, mask=column < latent, other=0).to(tl.float32)
    mask = (row < value)[:, None] & (column < latent)[None, :]
    weights = tl.load(weight + at.to(tl.int64)[:, None] * latent + column[None, :], mask=mask, other=0)
    sums = tl.sum(weights.to(tl.float32) * numbers[None, :], 1)
    if scale is not None:
        sums *= tl.load(scale + at, mask=row < value, other=0).to(tl.float32)
    tl.store(out + head * value + row, sums.to(tl.bfloat16), mask=row < value)
