"""How important each expert is to a prompt: attention heavy hitters, load or gate weights (DyMoE eq. 1-2)."""

from __future__ import annotations

import torch

QUERY_BLOCK = 16
"""Query rows whose attention scores are in memory at once; workspace.workspace_bytes counts them."""

LAST_QUERIES = 32
"""Query rows that "heavy-hitters-last" averages over."""


class PromptAttention:
    """Attention that a sequence's tokens receive from one prompt, which may go through the model in several steps.

    Each layer's sums are kept from step to step. So after any step they are those of DyMoE eq. 1 over all queries of
    the prompt so far; tokens before the prompt (earlier turns) receive attention, and their own queries count nothing.
    The rows of a step may come in several blocks.

    >>> prompt, zeros = PromptAttention(), torch.zeros(1, 3, 4)
    >>> received = attention_received(zeros, zeros, 1.0, None, 0)  # every query looks at all that it sees
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
            layer: of the model.
            received: float32 [N], attention that each of the tokens so far receives from the block's rows, from
                first_counted on: the sum of the mean over heads. Overwritten.
            block: the rows among those of the step.
            signal: as of `ranks`.
        """
        of_prompt = None if signal == "heavy-hitters-last" else self._sums.get(layer)
        earlier = self._step_sums.get(layer) if block.start else of_prompt
        if earlier is not None:
            received[: len(earlier)] += earlier
        self._step_sums[layer] = received

    def ranks(self, layer: int, rows: int, window: int | None, signal: str) -> torch.Tensor:
        """Ranks a layer's rows of a step among all N tokens of the sequence, once all blocks have come.

        Args:
            layer: of the model.
            rows: R, of the step.
            window: latest tokens that a row sees, its own included; None: all.
            signal: "heavy-hitters" ranks by the mean over heads and all the prompt's queries so far;
                "heavy-hitters-mean" over those that see the token; "heavy-hitters-last" over the last LAST_QUERIES of
                this step.

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
        signal: as there.
        block: rows among those of a step.
        rows: of the step.
    """
    last = signal == "heavy-hitters-last"
    return min(max(rows - LAST_QUERIES - block.start, 0), len(block)) if last else 0


def attention_received(
    query: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    window: int | None,
    skipped: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention that every token receives, summed over queries, a mean over heads; without an [R, N] matrix.

    Args:
        query: [heads, R, D], of the last R of the N tokens.
        keys: [kv_heads, N, D]; heads is a multiple of kv_heads.
        scaling: factor of the scores.
        window: latest tokens that a row sees, its own included; None: all.
        skipped: first rows of `query` that are left out.
        sinks: [heads], a score in every query's softmax that belongs to no token.

    Returns:
        float32 [N].
    """
    heads, rows, _ = query.shape
    tokens = keys.shape[1]
    transposed = keys.float().mT
    past = tokens - rows
    received = torch.zeros(tokens, device=query.device)
    for start in range(skipped, rows, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, rows)
        hidden = hidden_keys(range(past + start, past + end), range(tokens), window, query.device)
        received += attention_weights(query[:, start:end], transposed, hidden, scaling, sinks).sum((0, 1))
    return received / heads


def queries_seeing(queries: range, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """How many of the queries at some positions see each token, at least 1; [N] of the dtype and device of `like`."""
    token = torch.arange(len(like), device=like.device)
    until = torch.clamp(token + window, max=queries.stop) if window else torch.full_like(token, queries.stop)
    return (until - token.clamp_min(queries.start)).clamp_min(1).to(like.dtype)


def hidden_keys(rows: range, keys: range, window: int | None, device: torch.device) -> torch.Tensor:
    """The mask of causal attention by positions: bool [rows, keys], true where a row does not see a key.

    Args:
        rows, keys: their positions.
        window: as in attention_received.
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
        scaling, sinks: as in attention_received.

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
        heavy_hitters: fraction of all tokens so far that are heavy hitters, those that received most attention. Of
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
        # Seeded by the routing, so that the answer to a prompt is reproducible.
        generator = torch.Generator().manual_seed(int(flat.sum()))
        return torch.rand(experts, generator=generator) + 1e-3
    load = torch.bincount(flat, minlength=experts).float()
    tie = gates / (gates.sum() * 2)
    if signal == "load" or ranks is None:
        return load + tie
    tokens, slots = top_k_index.shape
    heavy = ranks < heavy_hitters
    count = max(1, int(heavy.sum()))
    hits = torch.bincount(top_k_index[heavy].reshape(-1), minlength=experts).float()
    if signal == "mix":
        return load / (tokens * slots) + hits / (count * slots) + tie / (tokens * slots)
    return hits + tie
