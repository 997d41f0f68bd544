"""Attention over the KV against softmax written out."""

from __future__ import annotations

import math

import pytest
import torch

from edgemoe import attention as attention_module
from edgemoe.attention import attend


def written_out(query, keys, values, scaling, window):
    """Row by row in float64, straight from the definition."""
    heads, rows, _ = query.shape
    groups, past = heads // keys.shape[0], keys.shape[1] - rows
    out = torch.empty_like(query, dtype=torch.float64)
    for head in range(heads):
        for row in range(rows):
            position = past + row
            first = 0 if window is None else max(position - window + 1, 0)
            k, v = (t[head // groups, first : position + 1].double() for t in (keys, values))
            weights = torch.softmax(k @ query[head, row].double() * scaling, 0)
            out[head, row] = weights @ v
    return out


@pytest.mark.parametrize("fast", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(("rows", "past"), [(1, 0), (1, 9), (6, 0), (6, 5), (17, 1)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 1)])
def test_attend_is_causal_grouped_attention(monkeypatch, fast, window, rows, past, heads, kv_heads):
    """Every row sees itself and what came before, within the window, whatever part of it was cached."""
    monkeypatch.setattr(attention_module, "fast_bf16", lambda: fast)
    generator = torch.Generator().manual_seed(rows + past)
    query = torch.randn(heads, rows, 16, generator=generator).bfloat16()
    keys, values = (torch.randn(kv_heads, past + rows, 16, generator=generator).bfloat16() for _ in range(2))
    got = attend(query, keys, values, 1 / math.sqrt(16), window).double()
    want = written_out(query, keys, values, 1 / math.sqrt(16), window)
    assert (got - want).norm() / want.norm() < 0.01
