"""Operators on many rows, on all threads, have the result of one row after another."""

from __future__ import annotations

import pytest
import torch
from availability import needs_native

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.router import NativeRouter, RouterForm
from edgemoe.kernels.native.rows import add_weighted_rows

pytestmark = needs_native


@pytest.mark.parametrize("cols", [8, 300, 1027])
def test_rows_are_added_in_their_order(cols):
    """Tokens with several rows, and with none; bits of one fused multiplication and addition after another."""
    generator = torch.Generator().manual_seed(cols)
    rows = torch.randn(40, cols, generator=generator).bfloat16()
    tokens = torch.randint(0, 9, (40,), generator=generator)
    weights = torch.rand(40, generator=generator)
    sums = torch.randn(10, cols, generator=generator)
    want = sums.clone()
    for row, token, weight in zip(rows, tokens, weights, strict=True):
        # Exact in float64: a product of a bf16 and a float32 has 32 bits; the sum is rounded once.
        want[token] = (row.double() * weight.double() + want[token].double()).float()
    add_weighted_rows(sums, rows, tokens, weights)
    assert torch.equal(sums, want)
    with pytest.raises(ValueError, match="expected rows of"):
        add_weighted_rows(sums, rows[:, 1:], tokens, weights)


def test_norms_of_many_rows_are_those_of_each():
    """100 rows of 512, above the size from which threads share the work."""
    x, weight = torch.randn(100, 512).bfloat16(), torch.randn(512).bfloat16()
    assert x.numel() >= native._WORTH_THREADS
    alone = torch.cat([native.rms_norm(row[None], weight, 1e-5) for row in x])
    assert torch.equal(native.rms_norm(x, weight, 1e-5), alone)


def test_routers_choose_alike_for_many_and_for_one():
    """100 tokens in one call, whose softmax is on all threads, and one after another."""
    router = NativeRouter(torch.randn(24, 64).bfloat16(), 4, RouterForm(normalise=True, rounded=False))
    x = torch.randn(100, 64).bfloat16()
    together = router(x)
    alone = [router(row[None]) for row in x]
    for i, name in enumerate(("logits", "experts", "gates")):
        assert torch.equal(together[i], torch.cat([one[i] for one in alone])), name
