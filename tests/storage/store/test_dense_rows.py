"""8 bits per output row: bounds from the definition, and torch's kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemoe.storage.store import dense
from edgemoe.storage.store.dense import quantize_rows


def a_matrix(rows: int, cols: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A Gaussian matrix whose row sizes spread over ten powers of two."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.rand(rows, 1, generator=generator) * 10 - 5)
    return (torch.randn(rows, cols, generator=generator) * sizes).to(dtype)


@settings(max_examples=40)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31), st.sampled_from(["float32", "bfloat16"])
)
def test_no_weight_is_off_by_more_than_half_a_step(rows, cols, seed, dtype):
    """No weight is clipped, and every weight is rounded to the nearest code of its row."""
    weight = a_matrix(rows, cols, seed, getattr(torch, dtype))
    codes, scales = quantize_rows(weight)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.bfloat16)
    assert (codes.shape, scales.shape) == (weight.shape, (rows,))
    steps = scales.double().unsqueeze(1)
    assert bool((weight.double() - codes.double() * steps).abs().le(steps * 0.5001).all())
    assert int(codes.abs().max()) <= 127


def test_scale_is_the_smallest_bf16_that_clips_nothing():
    """Row maxima 127 and 127.5 give the scale 1 and the next bf16 above 127.5 / 127."""
    codes, scales = quantize_rows(torch.tensor([[127.0, -3.4], [-127.5, 63.0]]))
    assert scales.tolist() == [1.0, 1.0078125]
    assert codes.tolist() == [[127, -3], [-127, 63]]


def test_a_row_of_zeros_stays_zero():
    """A row of zeros has codes and weights of zero."""
    codes, scales = quantize_rows(torch.tensor([[0.0, 0.0], [1.0, 0.5]]))
    assert codes[0].tolist() == [0, 0]
    assert (codes[0] * scales[0]).tolist() == [0.0, 0.0]


def test_source_is_not_changed_and_slices_change_no_bit(monkeypatch):
    """Quantization in slices of rows gives the same bits, and does not change the weight."""
    weight = a_matrix(33, 16, 1)
    kept = weight.clone()
    whole = quantize_rows(weight)
    monkeypatch.setattr(dense, "_SLICE", 5 * 16)
    sliced = quantize_rows(weight)
    assert torch.equal(weight, kept)
    assert all(torch.equal(a, b) for a, b in zip(whole, sliced, strict=True))


@pytest.mark.parametrize("shape", [(32, 64), (48, 128)])
def test_dequantized_rows_agree_with_torchs_kernel(shape):
    """x W^T with the dequantized matrix agrees with torch's product of bf16 and 8-bit rows."""
    codes, scales = quantize_rows(a_matrix(*shape, 2))
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = torch.ops.aten._weight_int8pack_mm(x, codes, scales).float()
    got = x.float() @ (codes.float() * scales.float().unsqueeze(1)).t()
    assert float((got - expected).norm() / expected.norm()) < 0.01
