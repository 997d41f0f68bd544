"""How important each expert is to a prompt: attention heavy hitters, load or gate weights (DyMoE eq. 1-2)."""

from __future__ import annotations

import torch

QUERY_BLOCK = 16
"""Query rows whose attention scores are in memory at once; plan.workspace_bytes counts them."""

LAST_QUERIES = 32
"""Query rows that "heavy-hitters-last" averages over."""


def token_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    window: int | None,
    signal: str,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention that each of a sequence's last rows receives (DyMoE eq. 1), without a [R, N] matrix.

    Args:
        query: [heads, R, D], the last R of the N tokens.
        keys: [kv_heads, N, D]; heads is a multiple of kv_heads.
        scaling: factor of the scores.
        window: latest tokens that a row sees, its own included; None: all.
        signal: "heavy-hitters" is the mean over heads and all R queries; "heavy-hitters-mean" over the
            queries that see the token; "heavy-hitters-last" over the last LAST_QUERIES queries.
        sinks: [heads], a score in every query's softmax that belongs to no token.

    Returns:
        float32 [R], for the same rows as `query`.
    """
    heads, rows, _ = query.shape
    tokens = keys.shape[1]
    transposed = keys.float().mT
    past = tokens - rows
    first = max(rows - LAST_QUERIES, 0) if signal == "heavy-hitters-last" else 0
    received = torch.zeros(tokens, device=query.device)
    for start in range(first, rows, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, rows)
        hidden = hidden_keys(range(past + start, past + end), range(tokens), window, query.device)
        received += attention_weights(query[:, start:end], transposed, hidden, scaling, sinks).sum((0, 1))
    own = received[past:] / heads
    if signal != "heavy-hitters-mean":
        return own / (rows - first)
    row = torch.arange(rows, device=query.device)
    seen_until = torch.clamp(row + window, max=rows) if window else torch.full_like(row, rows)
    return own / (seen_until - row)


def hidden_keys(rows: range, keys: range, window: int | None, device: torch.device) -> torch.Tensor:
    """The mask of causal attention by positions: bool [rows, keys], true where a row does not see a key.

    Args:
        rows, keys: their positions.
        window: as in token_scores.
        device: of the mask.
    """
    row = torch.arange(rows.start, rows.stop, device=device)[:, None]
    key = torch.arange(keys.start, keys.stop, device=device)
    hidden = key > row
    if window:
        hidden |= key <= row - window
    return hidden


def attention_weights(
    query: torch.Tensor,
    transposed: torch.Tensor,
    hidden: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The softmax of a block of rows' attention scores, without the weight of the sinks.

    Args:
        query: [heads, R, D].
        transposed: float32 keys [kv_heads, D, N].
        hidden: bool [R, N], of hidden_keys.
        scaling, sinks: as in token_scores.

    Returns:
        float32 [heads, R, N].
    """
    heads, rows, dim = query.shape
    kv_heads, _, tokens = transposed.shape
    # The heads of a group are rows of one product: as a batch each would get its own copy of the keys.
    grouped = query.reshape(kv_heads, -1, dim).float() * scaling
    scores = (grouped @ transposed).view(heads, rows, tokens).masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, rows, 1)), dim=-1)
    return scores.softmax(-1)[..., :tokens]


def needs_attention(signal: str) -> bool:
    """Whether a signal of expert_importance depends on token_scores."""
    return signal.startswith("heavy-hitters") or signal == "mix"


def attention_kind(signal: str) -> str:
    """The signal of token_scores that a signal of expert_importance depends on."""
    return "heavy-hitters-mean" if signal == "mix" else signal


def expert_importance(
    signal: str,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    scores: torch.Tensor | None,
    heavy_hitters: float,
    experts: int,
) -> torch.Tensor:
    """How important each expert is to a prompt.

    Args:
        signal: "heavy-hitters*" counts the heavy hitters routed to the expert (DyMoE eq. 2); "load" counts all its
            tokens; "gate" sums its gate weights; "mix" adds its fractions of heavy hitters and of load; "random".
        top_k_index: int64 [T, k].
        top_k_weights: [T, k].
        scores: float [T] of token_scores, for "heavy-hitters*" and "mix"; None: a layer without attention, where load
            decides.
        heavy_hitters: fraction of the T tokens that are heavy hitters, those with the highest scores.
        experts: E.

    Returns:
        float32 [E]. Ties within a signal are broken by the sum of gate weights.
    """
    flat = top_k_index.reshape(-1)
    gates = torch.zeros(experts).index_add_(0, flat, top_k_weights.reshape(-1).float())
    if signal == "gate":
        return gates
    if signal == "random":
        # Seeded by the routing, so that the answer to a prompt is reproducible.
        generator = torch.Generator().manual_seed(int(flat.sum()))
        return torch.rand(experts, generator=generator) + 1e-3
    load = torch.bincount(flat, minlength=experts).float()
    tie = gates / (gates.sum() * 2)
    if signal == "load" or scores is None:
        return load + tie
    tokens, slots = top_k_index.shape
    count = max(1, round(heavy_hitters * tokens))
    heavy = scores.topk(count).indices
    hits = torch.bincount(top_k_index[heavy].reshape(-1), minlength=experts).float()
    if signal == "mix":
        return load / (tokens * slots) + hits / (count * slots) + tie / (tokens * slots)
    return hits + tie
