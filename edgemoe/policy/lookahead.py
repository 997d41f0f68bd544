"""Predicts the experts of the next layer (DyMoE eq. 6-8)."""

from __future__ import annotations

import torch


def predict(logits: torch.Tensor, top_k: int, *, decode: bool) -> list[int]:
    """The next layer's experts, the likeliest first, from what its router says of this layer's hidden state.

    The residual stream changes little between two layers, so the next router already says on this layer's state
    most of what it will say on its own. Every token predicts its top_k (eq. 6). In prefill experts are ordered by
    how many tokens predict them (eq. 7), and by their mean score where that is equal; in decode by their score
    (eq. 8), the highest of any token. The t of the equations is how many of these the caller takes.

    Args:
        logits: [T, E], any float dtype: the top k of a row are the next router's choice on what this layer's router
            sees.
        top_k: experts a token is routed to, 1 to E.
        decode: every token is one sequence's next; otherwise tokens are a prompt's.

    Returns:
        distinct experts, at least top_k and at most min(E, T * top_k) of them.
    """
    logits = logits.float()
    if logits.shape[0] == 1:
        return logits[0].topk(top_k).indices.tolist()
    scores = logits.softmax(-1)
    best, chosen = scores.topk(top_k)
    if decode:
        ranks = torch.full_like(scores, -1).scatter(1, chosen, best).amax(0)
        count = int((ranks >= 0).sum())
    else:
        frequency = chosen.flatten().bincount(minlength=scores.shape[1])
        # Float64: a mean score below 1 must order equal frequencies, however many tokens there are.
        ranks = frequency.double() + scores.mean(0).double()
        count = int((frequency > 0).sum())
    return ranks.argsort(descending=True, stable=True)[:count].tolist()
