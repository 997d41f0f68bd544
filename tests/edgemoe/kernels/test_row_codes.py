"""Codes of 8 bits with one scale per row, chosen with error feedback."""

from __future__ import annotations

import pytest
import torch
from availability import needs_native

from edgemoe.kernels.native.columns import calibrated_rows
from edgemoe.storage.record.nested_codes import ColumnOrder, row_codes
from edgemoe.storage.store.dense import quantize_rows


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    """A matrix of rows and columns in no whole block, one row of zeros."""
    made = torch.randn(45, 150, generator=torch.Generator().manual_seed(4))
    made[7] = 0
    return made


def test_without_a_hessian_codes_are_the_nearest(weight):
    """A Hessian of no tokens takes no error to other columns."""
    codes, scales = quantize_rows(weight)
    assert torch.equal(row_codes(weight, scales, ColumnOrder(torch.zeros(150, 150), 150)), codes)


@needs_native
def test_products_lose_less_with_the_compiled_functions_bits(weight):
    """Inputs in a space of 40 dimensions: products are off by less than a third of what rounding to nearest costs."""
    chance = torch.Generator().manual_seed(5)
    x = torch.randn(400, 40, generator=chance) @ torch.randn(40, 150, generator=chance)
    codes, scales = quantize_rows(weight)
    order = ColumnOrder(x.t() @ x, 150)
    made = calibrated_rows(weight, scales, order)
    assert torch.equal(made, row_codes(weight, scales, order))
    assert int(made.min()) >= -127

    def lost(numbers: torch.Tensor) -> float:
        return float((x @ (numbers.float() * scales.float().unsqueeze(1) - weight).t()).norm())

    assert lost(made) < 0.35 * lost(codes)
