"""Predicts the experts of the next layer (DyMoE eq. 6-8)."""

from __future__ import annotations

import torch

from edgemoe.policy.remapping import Remapping


def predict(
    logits: torch.Tensor, top_k: int, *, decode: bool, remapping: Remapping | None = None
) -> list[list[int]]:
    """The next layer's experts, the likeliest first, from what its router says of this layer's hidden state.

    The residual stream changes little between two layers, so the next router already says on this layer's state
    most of what it will say on its own. Every token predicts its top_k (eq. 6). In prefill experts are ordered by
    how many tokens predict them (eq. 7), and by their mean score where that is equal; in decode each token's by their
    score (eq. 8). The t of the equations is how many of these the caller takes.

    Args:
        logits: [T, E], any float dtype: the top k of a row are the next router's choice on what this layer's router
            sees.
        top_k: number of experts of a token, 1 to E.
        decode: every token is one sequence's next; otherwise tokens are a prompt's.
        remapping: how tokens of several sequences agree on experts; None: each has its own choice.

    Returns:
        distinct experts: in decode top_k of each token; otherwise one list, of top_k to min(E, T * top_k) of them.
    """
    logits = logits.float()
    if decode or logits.shape[0] == 1:
        chosen = remapping.choose(logits, top_k) if remapping else logits.topk(top_k).indices
        return chosen.tolist()
    scores = logits.softmax(-1)
    chosen = scores.topk(top_k).indices
    frequency = chosen.flatten().bincount(minlength=scores.shape[1])
    # Float64: a mean score below 1 must order equal frequencies, however many tokens there are.
    ranks = frequency.double() + scores.mean(0).double()
    count = int((frequency > 0).sum())
    return [ranks.argsort(descending=True, stable=True)[:count].tolist()]
