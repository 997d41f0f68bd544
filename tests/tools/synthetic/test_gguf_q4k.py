"""tools/synthetic/gguf_q4k.py: the package gguf decodes its blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from edgemoe.errors import UserError
from tools.synthetic.gguf_q4k import BYTES, WEIGHTS, quantize

pytestmark = pytest.mark.e2e

KIND = gguf.GGMLQuantizationType.Q4_K


def decode(blocks: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(blocks, KIND)


def test_sizes_equal_the_packages() -> None:
    """Weights and bytes of a block equal the package's for Q4_K."""
    assert gguf.GGML_QUANT_SIZES[KIND] == (WEIGHTS, BYTES)


def test_gaussian_weights_are_decoded() -> None:
    """The shape stays, and the error is as with 16 even steps over the range of 32 Gaussians."""
    weights = np.random.default_rng(0).standard_normal((6, 512), np.float32)
    again = decode(quantize(weights))
    assert again.shape == weights.shape
    groups = weights.reshape(-1, 32)
    step = (groups.max(1) - groups.min(1)) / 15
    plain = np.sqrt((step**2 / 12).mean())
    # Scales and minima have 6 bits each, which costs a little on top of the steps themselves.
    assert plain < np.sqrt(((again - weights) ** 2).mean()) * 1.05
    assert np.sqrt(((again - weights) ** 2).mean()) < 1.25 * plain


@given(
    arrays.arrays(np.float32, (2, WEIGHTS), elements=st.floats(-1000, 1000, width=32, allow_subnormal=False))
)
def test_error_of_every_weight_is_bounded(weights: np.ndarray) -> None:
    """No weight's error exceeds a step of its block's widest group and the rounding of 6-bit scales."""
    error = np.abs(decode(quantize(weights)) - weights).max(1)
    assert (error <= np.abs(weights).max(1) * (2 / 15 + 2 / 63) + 1e-4).all()


def test_zeros_stay_zero() -> None:
    """A block without a range is legal."""
    assert not decode(quantize(np.zeros((1, WEIGHTS), np.float32))).any()


def test_rows_that_do_not_divide_are_refused() -> None:
    """A width that is no multiple of a block is refused with the matrix's shape."""
    with pytest.raises(UserError, match="3 x 64"):
        quantize(np.zeros((3, 64), np.float32))
