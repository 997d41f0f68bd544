"""tools/synthetic/gguf_q4k.py beside the gguf package's own reading of the type."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from storage.errors import UserError
from tools.synthetic.gguf_q4k import BYTES, WEIGHTS, quantize

KIND = gguf.GGMLQuantizationType.Q4_K


def read(blocks: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(blocks, KIND)


def test_sizes_are_the_types_own() -> None:
    """Block and bytes are what the package says of Q4_K."""
    assert gguf.GGML_QUANT_SIZES[KIND] == (WEIGHTS, BYTES)


def test_gaussian_weights_come_back() -> None:
    """Shapes are kept, and the error is that of 16 even steps over the range of 32 Gaussians."""
    weights = np.random.default_rng(0).standard_normal((6, 512), np.float32)
    again = read(quantize(weights))
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
def test_no_weight_is_far_off(weights: np.ndarray) -> None:
    """Whatever the weights, none is off by more than a step of its block's widest 32 and what 6 bits round away."""
    error = np.abs(read(quantize(weights)) - weights).max(1)
    assert (error <= np.abs(weights).max(1) * (2 / 15 + 2 / 63) + 1e-4).all()


def test_zeros_stay_zero() -> None:
    """A block without any range is legal."""
    assert not read(quantize(np.zeros((1, WEIGHTS), np.float32))).any()


def test_rows_that_do_not_divide() -> None:
    """A width that is no multiple of a block is refused with its shape."""
    with pytest.raises(UserError, match="3 x 64"):
        quantize(np.zeros((3, 64), np.float32))
