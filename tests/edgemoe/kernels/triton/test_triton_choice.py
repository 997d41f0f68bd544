"""Triton's kernels around a token's experts against torch: on a GPU if present, else in the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu

from edgemoe.kernels.triton.choice import report_choice, weighted_rows

pytestmark = [pytest.mark.triton, pytest.mark.gpu, NEEDS_TRITON]


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    round_like_a_gpu(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gates", [[0.5], [0.1, 0.4, 0.25], [0.25, 0.5, 0.25, 0.5, -0.5], [torch.nan, 1, 0]])
def test_a_choice_is_reported_by_its_gate_weights(dtype, gates):
    """Experts and gate weights have a stable order of descending weights, and the router's where one is NaN."""
    weights = torch.tensor(gates, dtype=dtype)
    k, choice = len(gates), torch.arange(len(gates)) * 7 % 11
    report = torch.full((3 * k,), -1, dtype=torch.int32, device=DEVICE)
    predicted = torch.arange(k).flip(0) + 3
    report_choice(choice.to(DEVICE), weights.to(DEVICE), predicted.to(DEVICE), report)
    order = torch.arange(k) if weights.isnan().any() else weights.argsort(descending=True, stable=True)
    got = report.cpu()
    assert got[: 2 * k].tolist() == [*choice[order].tolist(), *predicted.tolist()]
    assert torch.equal(got[2 * k :].view(torch.float32), weights.float()[order]) or weights.isnan().any()


@pytest.mark.parametrize("size", [24, 1500])
def test_rows_are_summed_by_their_gate_weights(size):
    """Sums equal float32's but for the last bit of bf16; a row with gate weight 0 is not read, not even a NaN."""
    rows = torch.randn(4, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    gates, want = torch.tensor([0.5, 0.0, 0.25, -0.125]), torch.zeros(size)
    for gate, row in zip(gates, rows.float(), strict=True):
        want = want + gate * row
    rows[1] = torch.nan
    out = torch.full((size,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    weighted_rows(rows.to(DEVICE), gates.to(DEVICE), out)
    assert torch.allclose(out.cpu().float(), want, rtol=2**-8, atol=1e-6)
