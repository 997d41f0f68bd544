"""Causal grouped-query attention of a sequence's last rows, by torch's operators or over tiles of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from edgemoe.kv.formats import TILE, TILE_QUERIES
from edgemoe.machine.cpu import fast_bf16
from edgemoe.policy.importance import hidden_keys

_LOWEST = -1e30
"""A score below all others."""

Read = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""(first, end) -> keys and values of these tokens, as SequenceKV.read."""


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """Computes causal grouped-query attention of a sequence's last rows.

    Args:
        query: [heads, R, D], of the last R of N tokens.
        keys: [kv_heads, N, D]; heads is a multiple of kv_heads.
        values: [kv_heads, N, V], V at most D.
        scaling: factor of the scores.
        window: number of latest tokens that a row attends to, itself included; None: all.

    Returns:
        [heads, R, V] in query's dtype.
    """
    heads, rows, dim = query.shape
    kv_heads, tokens, _ = keys.shape
    dtype, value_dim = query.dtype, values.shape[2]
    if query.device.type == "cpu" and not fast_bf16():
        if rows == 1:
            return attend_tiles(
                query, lambda first, end: (keys[:, first:end], values[:, first:end]), tokens, scaling, window
            )
        query, keys, values = query.float(), keys.float(), values.float()
    if value_dim < dim:
        # torch's kernels for unequal sizes store the whole matrix of scores.
        values = F.pad(values, (0, dim - value_dim))
    grouped = query.reshape(kv_heads, heads // kv_heads, rows, dim)
    if rows == 1:
        start = max(tokens - window, 0) if window else 0
        out = F.scaled_dot_product_attention(
            grouped.transpose(1, 2), keys[:, None, start:], values[:, None, start:], scale=scaling
        ).transpose(1, 2)
    else:
        out = _attend_rows(grouped, keys, values, scaling, window)
    return out.reshape(heads, rows, dim)[..., :value_dim].to(dtype)


def _attend_rows(
    grouped: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    """`attend` for several rows: [kv_heads, heads per kv_head, R, D], keys and values [kv_heads, N, D]."""
    (kv_heads, tokens, dim), rows = keys.shape, grouped.shape[2]
    shape = kv_heads, grouped.shape[1], tokens, dim
    keys, values = keys[:, None].expand(shape), values[:, None].expand(shape)
    if rows == tokens and not (window and window < tokens):
        return F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scaling)
    seen = hidden_keys(range(tokens - rows, tokens), range(tokens), window, grouped.device).logical_not_()
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen, scale=scaling)


def attend_tiles(
    query: torch.Tensor,
    read: Read,
    tokens: int,
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes `attend` over keys and values of which only TILE tokens are float32 at once.

    A running largest score and sum make the softmax (FlashAttention, Dao et al. 2022).

    Args:
        query: [heads, R, D], of the last R tokens.
        read: (first, end) -> keys [kv_heads, n, D] and values [kv_heads, n, V] of these tokens.
        tokens: N.
        scaling, window: see attend.
        sinks: [heads], one more score per head in the softmax: the score of a token without a value; None: none.

    Returns:
        [heads, R, V] in query's dtype.
    """
    heads, rows, _ = query.shape
    past = tokens - rows
    first = max(past + 1 - window, 0) if window else 0
    wide = query.float() * scaling
    blocks = [range(start, min(start + TILE_QUERIES, rows)) for start in range(0, rows, TILE_QUERIES)]
    running = [_Running.of(heads, len(block), sinks, query.device) for block in blocks]
    for start in range(first // TILE * TILE, tokens, TILE):
        end = min(start + TILE, tokens)
        keys, values = (part.float() for part in read(start, end))
        for block, state in zip(blocks, running, strict=True):
            positions = range(past + block.start, past + block.stop)
            if start < positions.stop and not (window and end <= positions.start + 1 - window):
                hidden = hidden_keys(positions, range(start, end), window, query.device)
                state.add(wide[:, block.start : block.stop], keys, values, hidden)
    return torch.cat([state.result() for state in running], dim=1).to(query.dtype)


@dataclass
class _Running:
    """A softmax and its weighted sum over the tiles so far, of some rows.

    Args:
        largest, total: float32 [heads, R, 1], the largest score and the sum of e^(score - largest).
        sums: float32 [heads, R, V], the sum of values by these; None: no tile yet.
    """

    largest: torch.Tensor
    total: torch.Tensor
    sums: torch.Tensor | None = None

    @classmethod
    def of(cls, heads: int, rows: int, sinks: torch.Tensor | None, device: torch.device) -> _Running:
        """Before the first tile: nothing, or the sinks' scores."""
        if sinks is None:
            shape = heads, rows, 1
            return cls(torch.full(shape, _LOWEST, device=device), torch.zeros(shape, device=device))
        largest = sinks.float()[:, None, None].repeat(1, rows, 1)
        return cls(largest, torch.ones_like(largest))

    def add(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
    ) -> None:
        """Adds a tile: query [heads, R, D] by keys [kv_heads, n, D], of which `hidden` [R, n] are not seen."""
        heads, rows, dim = query.shape
        kv_heads = len(keys)
        # The heads of a group are rows of one product: as a batch each would get its own copy of the keys.
        scores = (query.reshape(kv_heads, -1, dim) @ keys.mT).view(heads, rows, -1)
        scores.masked_fill_(hidden, -torch.inf)
        largest = torch.maximum(self.largest, scores.amax(-1, keepdim=True))
        weights = scores.sub_(largest).exp_()
        factor = (self.largest - largest).exp_()
        summed = (weights.view(kv_heads, -1, weights.shape[2]) @ values).view(heads, rows, -1)
        self.total = self.total * factor + weights.sum(-1, keepdim=True)
        self.sums = summed if self.sums is None else self.sums * factor + summed
        self.largest = largest

    def result(self) -> torch.Tensor:
        """float32 [heads, R, V]."""
        assert self.sums is not None
        return self.sums / self.total
