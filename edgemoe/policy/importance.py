"""How important each expert is to a prompt: attention heavy hitters, load or gate weights (DyMoE eq. 1-2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

QUERY_BLOCK, KEY_BLOCK = 64, 256
"""Query rows and tokens whose attention scores, and whose keys in float32, are in memory at once."""

_LOWEST = -1e30
"""A score below all others."""

LAST_QUERIES = 32
"""Query rows that "heavy-hitters-last" averages over."""


Keys = Callable[[int, int], torch.Tensor]
"""(first, end) -> keys [kv_heads, end - first, D] of these tokens."""


class PromptAttention:
    """Attention that a sequence's tokens receive from one prompt, which may go through the model in several steps.

    Each layer's sums are kept from step to step. So after any step they are the sums of DyMoE eq. 1 over all queries of
    the prompt so far; tokens before the prompt (earlier turns) receive attention, and their own queries count nothing.
    The rows of a step may come in several blocks.

    >>> prompt, zeros = PromptAttention(), torch.zeros(1, 3, 4)
    >>> def keys(first: int, end: int) -> torch.Tensor:
    ...     return zeros[:, first:end]
    >>> received = attention_received(zeros, keys, 3, 1.0, None, 0)  # every query looks at all that it sees
    >>> prompt.receive(0, received, range(3), "heavy-hitters")
    >>> prompt.ranks(0, 3, None, "heavy-hitters").tolist()
    [0.0, 0.3333333432674408, 0.6666666865348816]
    """

    def __init__(self) -> None:
        self._rows = 0
        self._sums: dict[int, torch.Tensor] = {}
        self._step_sums: dict[int, torch.Tensor] = {}

    def receive(self, layer: int, received: torch.Tensor, block: range, signal: str) -> None:
        """Adds the attention of a block of a step's rows. Blocks come in order; all of them may come twice in a step.

        Args:
            layer: number of the layer in the model.
            received: float32 [N], attention that each of the tokens so far receives from the block's rows, from
                first_counted on: the sum of the mean over heads. Overwritten.
            block: the rows among the step's rows.
            signal: the signal of `ranks`.
        """
        of_prompt = None if signal == "heavy-hitters-last" else self._sums.get(layer)
        earlier = self._step_sums.get(layer) if block.start else of_prompt
        if earlier is not None:
            received[: len(earlier)] += earlier
        self._step_sums[layer] = received

    def ranks(self, layer: int, rows: int, window: int | None, signal: str) -> torch.Tensor:
        """Ranks a layer's rows of a step among all N tokens of the sequence, once all blocks have come.

        Args:
            layer: number of the layer in the model.
            rows: R, of the step.
            window: latest tokens that a row sees, its own included; None: all.
            signal: "heavy-hitters" ranks by the mean over heads and all the prompt's queries so far;
                "heavy-hitters-mean" over the queries that see the token; "heavy-hitters-last" over the last
                LAST_QUERIES of this step.

        Returns:
            float32 [R]: the fraction of all N tokens that received more; of equals the earlier token ranks first.
        """
        received = self._step_sums[layer]
        tokens = len(received)
        if signal == "heavy-hitters-mean":
            received = received / queries_seeing(range(tokens - rows - self._rows, tokens), window, received)
        order = received.argsort(descending=True, stable=True)
        ranks = torch.empty_like(received)
        ranks[order] = torch.arange(tokens, dtype=received.dtype, device=received.device)
        return ranks[tokens - rows :] / tokens

    def commit(self, rows: int) -> None:
        """Adds the step that has just succeeded, of so many rows."""
        self._rows += rows
        self._sums |= self._step_sums
        self._step_sums = {}


def first_counted(signal: str, block: range, rows: int) -> int:
    """The first row of a block whose attention counts for a signal of PromptAttention.ranks, from the block's start.

    Args:
        signal: the signal of `ranks`.
        block: rows among a step's rows.
        rows: number of the step's rows.
    """
    last = signal == "heavy-hitters-last"
    return min(max(rows - LAST_QUERIES - block.start, 0), len(block)) if last else 0


def attention_received(
    query: torch.Tensor,
    keys: Keys,
    tokens: int,
    scaling: float,
    window: int | None,
    skipped: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention that every token receives, summed over queries, a mean over heads.

    Keys are read twice, a block at a time: for each query's largest score and the sum of its softmax, then for the
    weights. So neither an [R, N] matrix nor all keys in float32 are ever in memory.

    Args:
        query: [heads, R, D], of the last R of the N tokens.
        keys: the keys of a run of tokens; heads is a multiple of kv_heads.
        tokens: N.
        scaling: factor of the scores.
        window: latest tokens that a row sees, its own included; None: all.
        skipped: first rows of `query` that are left out.
        sinks: [heads], a score in every query's softmax that belongs to no token.

    Returns:
        float32 [N].
    """
    heads, rows, _ = query.shape
    past, wide = tokens - rows, query.float() * scaling
    softmaxes = [
        _Softmax.of(wide[:, start : start + QUERY_BLOCK], past + start, sinks)
        for start in range(skipped, rows, QUERY_BLOCK)
    ]
    received = torch.zeros(tokens, device=query.device)
    for weigh in (False, True):
        for start in range(0, tokens, KEY_BLOCK):
            span = range(start, min(start + KEY_BLOCK, tokens))
            _take_span(softmaxes, keys, span, window, received if weigh else None)
    return received / heads


def _take_span(
    softmaxes: list[_Softmax], keys: Keys, span: range, window: int | None, received: torch.Tensor | None
) -> None:
    """Counts a span's scores in softmaxes; with `received`, float32 [N], adds the weights to it instead."""
    seeing = [each for each in softmaxes if each.sees(span, window)]
    if not seeing:
        return
    transposed = keys(span.start, span.stop).float().mT
    for each in seeing:
        scores = each.scores(transposed, span, window)
        if received is None:
            each.add(scores)
        else:
            received[span.start : span.stop] += each.weights(scores).sum((0, 1))


@dataclass
class _Softmax:
    """The softmax of some rows' scores over the tokens so far.

    Args:
        query: float32 [heads, R, D], scaled.
        positions: the rows' positions.
        largest, total: float32 [heads, R, 1], the largest score and the sum of e^(score - largest).
    """

    query: torch.Tensor
    positions: range
    largest: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, query: torch.Tensor, first: int, sinks: torch.Tensor | None) -> _Softmax:
        """Before any token; sinks, [heads], are scores that belong to no token."""
        heads, rows, _ = query.shape
        if sinks is None:
            largest = query.new_full((heads, rows, 1), _LOWEST)
            total = torch.zeros_like(largest)
        else:
            largest = sinks.float()[:, None, None].repeat(1, rows, 1)
            total = torch.ones_like(largest)
        return cls(query, range(first, first + rows), largest, total)

    def sees(self, span: range, window: int | None) -> bool:
        """Whether a row sees a token of a span."""
        return span.start < self.positions.stop and not (
            window and span.stop <= self.positions.start + 1 - window
        )

    def scores(self, transposed: torch.Tensor, span: range, window: int | None) -> torch.Tensor:
        """float32 [heads, R, n] of a span's keys [kv_heads, D, n], -inf where a row does not see a key."""
        heads, rows, dim = self.query.shape
        # The heads of a group are rows of one product: as a batch each would get its own copy of the keys.
        scores = (self.query.reshape(len(transposed), -1, dim) @ transposed).view(heads, rows, -1)
        first, last = self.positions.start, self.positions.stop - 1
        if span.stop > first + 1 or (window and span.start <= last - window):
            scores.masked_fill_(hidden_keys(self.positions, span, window, scores.device), -torch.inf)
        return scores

    def add(self, scores: torch.Tensor) -> None:
        """Counts a span's scores in the largest and the sum."""
        largest = torch.maximum(self.largest, scores.amax(-1, keepdim=True))
        self.total *= (self.largest - largest).exp_()
        self.total += scores.sub_(largest).exp_().sum(-1, keepdim=True)
        self.largest = largest

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        """The weights of a span's scores, once all tokens are counted."""
        return scores.sub_(self.largest).exp_().div_(self.total)


def queries_seeing(queries: range, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """How many of the queries at some positions see each token, at least 1; [N] of the dtype and device of `like`."""
    token = torch.arange(len(like), device=like.device)
    until = torch.clamp(token + window, max=queries.stop) if window else torch.full_like(token, queries.stop)
    return (until - token.clamp_min(queries.start)).clamp_min(1).to(like.dtype)


def hidden_keys(rows: range, keys: range, window: int | None, device: torch.device) -> torch.Tensor:
    """The mask of causal attention by positions: bool [rows, keys], true where a row does not see a key.

    Args:
        rows, keys: their positions.
        window: see attention_received.
        device: the device of the mask.
    """
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)
    hidden = key > row
    if window:
        hidden |= key <= row - window
    return hidden


def needs_attention(signal: str) -> bool:
    """Whether a signal of expert_importance depends on PromptAttention."""
    return signal.startswith("heavy-hitters") or signal == "mix"


def attention_kind(signal: str) -> str:
    """The signal of PromptAttention.ranks that a signal of expert_importance depends on."""
    return "heavy-hitters-mean" if signal == "mix" else signal


def expert_importance(
    signal: str,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    ranks: torch.Tensor | None,
    heavy_hitters: float,
    experts: int,
) -> torch.Tensor:
    """How important each expert is to a prompt.

    Args:
        signal: "heavy-hitters*" counts the heavy hitters routed to the expert (DyMoE eq. 2); "load" counts all its
            tokens; "gate" sums its gate weights; "mix" adds its fractions of heavy hitters and of load; "random".
        top_k_index: int64 [T, k].
        top_k_weights: [T, k].
        ranks: float [T] of PromptAttention.ranks, for "heavy-hitters*" and "mix"; None: a layer without attention,
            where load decides.
        heavy_hitters: fraction of all tokens so far that are heavy hitters: they received most attention. Of
            the T tokens it may be another fraction, or none: gate weights decide then.
        experts: E.

    Returns:
        float32 [E]. Ties within a signal are broken by the sum of gate weights.
    """
    flat = top_k_index.reshape(-1)
    gates = torch.zeros(experts).index_add_(0, flat, top_k_weights.reshape(-1).float())
    if signal == "gate":
        return gates
    if signal == "random":
        return _random(experts, int(flat.sum()))
    load = torch.bincount(flat, minlength=experts).float()
    tie = gates / (gates.sum() * 2)
    if signal == "load" or ranks is None:
        return load + tie
    tokens, slots = top_k_index.shape
    heavy = ranks < heavy_hitters
    hits = torch.bincount(top_k_index[heavy].reshape(-1), minlength=experts).float()
    if signal == "mix":
        return load / (tokens * slots) + hits / (max(1, int(heavy.sum())) * slots) + tie / (tokens * slots)
    return hits + tie


def _random(experts: int, seed: int) -> torch.Tensor:
    """Random importance, float32 [E]. The routing seeds it, so that the answer to a prompt is reproducible."""
    return torch.rand(experts, generator=torch.Generator().manual_seed(seed)) + 1e-3
