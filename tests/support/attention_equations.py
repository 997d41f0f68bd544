"""Reference attention in float64, for the tests of fast attention."""

from __future__ import annotations

import torch


def by_the_equations(qkv, norms, rotation, keys, values, past, first, heads, scaling):
    """Attention of one token in float64, one head at a time.

    Args:
        qkv: [(heads + 2 kv_heads) dim], the outputs of the three projections.
        norms: weights and epsilons of the norms of queries and keys, or None.
        rotation: cosine and sine, [dim] each.
        keys, values: [kv_heads, context, dim]; the tokens in [first, past) are attended to.

    Returns:
        [heads dim], and the token's keys and values [kv_heads, dim].
    """
    kv_heads, _, dim = keys.shape
    cosine, sine = (table.double() for table in rotation)
    query, key, value = qkv.double().split([heads * dim, kv_heads * dim, kv_heads * dim])
    if norms:
        query, key = (
            torch.cat([p / (p.square().mean() + e).sqrt() * w.double() for p in part.split(w.numel())])
            for part, (w, e) in zip((query, key), norms, strict=True)
        )

    def rotated(head):
        low, high = head.split(dim // 2)
        return head * cosine + torch.cat((-high, low)) * sine

    new_keys = torch.stack([rotated(head) for head in key.split(dim)])
    out = []
    for number, head in enumerate(query.split(dim)):
        of = number // (heads // kv_heads)
        seen = torch.cat((keys[of, first:past].double(), new_keys[of : of + 1]))
        summed = torch.cat((values[of, first:past].double(), value.split(dim)[of][None]))
        out.append((seen @ rotated(head) * scaling).softmax(0) @ summed)
    return torch.cat(out), new_keys, value.view(kv_heads, dim)
