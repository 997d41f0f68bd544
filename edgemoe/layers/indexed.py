"""Attention to tokens that an index chooses (DeepSeek sparse attention), over the sequences of a step."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.attention import StoredAttention, kernel_fits
from edgemoe.kernels.native.attention_rows import LayerKV, Received
from edgemoe.kv.rows import rotate
from edgemoe.kv.sequence import SequenceKV
from edgemoe.kv.shape import INDEX_SCORES
from edgemoe.kv.step import StepKV
from edgemoe.layers.attend import attend_tiles
from edgemoe.layers.gqa import layer_kv, sums_of
from edgemoe.layers.mla import LatentHeads
from edgemoe.layers.row_blocks import rows_of
from edgemoe.policy.importance import attention_received

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values [heads, R, D] of one sequence's rows."""

How = tuple[float, int | None, torch.Tensor | None]
"""Factor of the scores, window and sinks."""

Compute = Callable[[Any, StepKV, int, Parts, How], torch.Tensor]
"""An attention module, a step's state, the place of a sequence in it, its rows, how -> [heads, R, V]."""


def indexers(model: nn.Module) -> dict[str, Any]:
    """The modules that choose tokens by index keys, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "index_topk")}


class IndexBySequence(nn.Module):
    """Runs a module that chooses the tokens of each row, with the index keys of each sequence of a step.

    A row's choice does not depend on which rows share the step: the compiled kernel computes scores where it runs, and
    of equal scores the earlier tokens count.

    Args:
        module: transformers' indexer, with `index_topk` and `weights_proj`.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module, self.limit = module, module.index_topk
        if module.weights_proj.weight.dtype == torch.int8:
            module.weights_proj = _Converting(module.weights_proj)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Writes the rows' index keys, and chooses the tokens that each row attends to.

        Returns:
            int32 [1, rows, K]; -1 in rows that attend to all tokens, as those do that have at most K.
        """
        given = signature(self.module.forward).bind(*args, **kwargs).arguments
        kv: StepKV = given["past_key_values"]
        rows, found = given["hidden_states"].shape[1], []
        for sequence, row, count in kv.spans:
            done = 0
            while done < count:
                heads_by_tokens = self.module.n_heads * (sequence.length + count)
                block = range(row + done, row + min(done + max(INDEX_SCORES // heads_by_tokens, 1), count))
                own = {name: rows_of(value, block, rows) for name, value in given.items()}
                found.append(self._block(own, sequence, sequence.length + done, len(block)))
                done += len(block)
        return torch.cat(found, dim=1)

    def _block(self, arguments: dict[str, Any], sequence: SequenceKV, before: int, rows: int) -> torch.Tensor:
        """Chooses for consecutive rows of one sequence, the first of which has so many tokens before it."""
        tokens, place = before + rows, arguments["hidden_states"].device
        keys = _IndexKeys(sequence, before)
        positions = torch.arange(before, tokens, device=place)[:, None]
        seen = torch.arange(tokens, device=place) <= positions
        with _InOrder(all_seen=tokens <= self.limit):
            chosen: torch.Tensor = self.module(
                **arguments | {"past_key_values": keys, "attention_mask": seen[None]}
            )
        if tokens <= self.limit:
            return positions.new_full((1, rows, self.limit), -1, dtype=torch.int32)
        return chosen.masked_fill(positions < self.limit, -1)


class _Converting(nn.Module):
    """An 8-bit linear layer for modules that convert its input to the type of its weight, which they take for bf16."""

    weight = torch.empty(0, dtype=torch.bfloat16)

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)


class _IndexKeys:
    """The index keys of a sequence after `before` tokens, as transformers' cache has them."""

    def __init__(self, sequence: SequenceKV, before: int) -> None:
        self._sequence, self._before = sequence, before

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Writes index keys bf16 [1, R, D]. Returns the keys of all tokens up to their last one, [1, tokens, D]."""
        end = self._before + indexer_key_states.shape[1]
        own = self._sequence.index[layer_idx]
        own[self._before : end] = indexer_key_states[0]
        return own[None, :end]


class _InOrder(TorchFunctionMode):
    """Within it an indexer's scores, their sum over heads, and its choice have an order that no other row changes.

    Args:
        all_seen: every row attends to all tokens, so that no scores are needed.
    """

    def __init__(self, *, all_seen: bool) -> None:
        super().__init__()
        self._all_seen, self._products = all_seen, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.matmul:
            self._products += 1
            return self._scores(*args) if self._products == 1 else _weighted(*args)
        if func is torch.Tensor.topk and not self._all_seen:
            count = args[1] if len(args) > 1 else (kwargs or {})["k"]
            order = args[0].sort(dim=-1, descending=True, stable=True).indices
            return SimpleNamespace(indices=order[..., :count])
        return func(*args, **kwargs or {})

    def _scores(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """float32 [1, R, heads, D] by [1, 1, D, tokens] to [1, R, heads, tokens]."""
        _, rows, heads, dim = queries.shape
        if self._all_seen:
            return queries.new_zeros(1, rows, heads, keys.shape[3])
        if not native.available() or queries.device.type != "cpu":
            return queries @ keys
        flat = queries.reshape(rows * heads, dim).contiguous()
        return native.wide_product(flat, keys[0, 0].t().contiguous()).view(1, rows, heads, -1)


def _weighted(weights: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """float32 [1, R, 1, heads] by [1, R, heads, tokens] to [1, R, 1, tokens], head after head."""
    summed = weights[..., :1] * scores[:, :, :1]
    for head in range(1, scores.shape[2]):
        summed = summed + weights[..., head : head + 1] * scores[:, :, head : head + 1]
    return summed


def chosen_tokens(
    all_tokens: Compute, indices: torch.Tensor, module: Any, kv: StepKV, index: int, parts: Parts, how: How
) -> torch.Tensor:
    """Computes the attention of one sequence's rows to the tokens that an index has chosen.

    Args:
        all_tokens: computes rows that attend to all tokens.
        indices: int [rows, K], the choice for all rows of the step.
        module, kv, index, parts, how: the arguments of a Compute.

    Returns:
        [heads, R, V].
    """
    (sequence, row, count), most = kv.spans[index], indices.shape[1]
    dense, out = min(max(most - sequence.length, 0), count), []
    if dense:
        queries, keys, values = (part[:, :dense] for part in parts)
        with kv.block(range(row, row + dense)):
            out.append(all_tokens(module, kv, 0, (queries, keys, values), how))
    for number in range(dense, count):
        with kv.block(range(row + number, row + number + 1)):
            tokens = indices[row + number].long().sort().values
            out.append(_one_row(module, kv, parts[0][:, number : number + 1], tokens, how[0]))
    return torch.cat(out, dim=1)


def _one_row(
    module: Any, kv: StepKV, query: torch.Tensor, tokens: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention [heads, 1, V] of one row, the step of `kv`, to some tokens in ascending order."""
    (sequence, _, _), layer = kv.spans[0], module.layer_idx
    shape, latents = sequence.shapes[layer], getattr(module, "latents", None) or LatentHeads(module)
    query = latents.query(query)
    heads, _, dim = query.shape
    received = sums_of(kv, 0)
    there = layer_kv(sequence, layer)
    keys = there.keys[:, tokens].contiguous()
    if query.device.type == "cpu" and kernel_fits(heads, shape.heads, dim):
        part = Received(torch.empty(len(tokens)), received.first) if received else None
        own = LayerKV(keys, keys, len(tokens) - 1, shape.format, shape.latent)
        summed = StoredAttention(heads, shape.heads, dim, scaling)(query, own, None, part)
        if received and part:
            received.sums.zero_()[tokens] = part.sums
            kv.receive(kv.places[0], kv.prompts[0], layer, received.sums, None)
    else:
        every = sequence.read(layer, 0, sequence.length + 1)
        wide = [part[:, tokens] for part in every]
        turned = rotate(query, shape.rotation)
        summed = attend_tiles(
            turned,
            lambda first, end: (wide[0][:, first:end], wide[1][:, first:end]),
            len(tokens),
            scaling,
            None,
        )
        if received:
            own_keys = wide[0]
            counted = attention_received(
                turned, lambda first, end: own_keys[:, first:end], len(tokens), scaling, None, received.first
            )
            received.sums.zero_()[tokens] = counted
            kv.receive(kv.places[0], kv.prompts[0], layer, received.sums, None)
    return latents.value(rotate(summed[..., : shape.latent], shape.rotation).to(torch.bfloat16))
