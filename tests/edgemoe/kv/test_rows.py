"""Stored rows of keys and values: their bytes by hand, their error, and the Hadamard rotation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.errors import UserError
from edgemoe.kv.formats import KINDS, KVFormat
from edgemoe.kv.rows import decode, encode, rotate, row_of


def test_a_row_of_8_bits_by_hand():
    """A scale of 1 in bf16, 0x3f80, and one byte per number; 40 numbers have two scales and 8 bytes of padding."""
    x = torch.zeros(40)
    x[0], x[1], x[2], x[31], x[32] = 127, -1, 0.5, -127, 63.5
    row = encode("q8_0", x).tolist()
    assert len(row) == 4 + 48
    assert row[:4] == [0x80, 0x3F, 0, 0x3F]
    assert (row[4:7], row[35], row[36]) == ([127, 255, 0], 129, 127)
    assert not any(row[37:])


def test_a_row_of_4_bits_by_hand():
    """The largest magnitude, 8, has code 0 and makes the scale -1; 0 is code 8; number i + 8 is in the high half."""
    x = torch.zeros(16)
    x[0], x[1], x[8], x[15] = 8, -3, 5, -7
    row = encode("q4_0", x).tolist()
    assert row == [0x80, 0xBF, 0x30, 0x8B, *[0x88] * 5, 0xF8]
    assert decode("q4_0", encode("q4_0", x), 16).tolist() == x.tolist()


@given(
    seed=st.integers(0, 1000),
    size=st.integers(1, 80),
    exponent=st.integers(-30, 30),
    kind=st.sampled_from(KINDS),
)
def test_an_error_is_at_most_half_a_step(seed, size, exponent, kind):
    """Of a block's largest magnitude: 1/254 at 8 bits; at 4 bits 1/16, and 1/8 at the end that has no code."""
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    row = encode(kind, x)
    assert (row.dtype, row.shape[-1]) == row_of(kind, size)
    error = (decode(kind, row, size) - x).abs()
    for start in range(0, size, 32):
        block = slice(start, start + 32)
        largest = x[:, block].abs().amax(-1)
        step = {"bf16": 1 / 256, "q8_0": 1 / 254, "q4_0": 1 / 8}[kind]
        assert (error[:, block].amax(-1) <= 1.01 * step * largest).all()
    if kind == "q4_0":
        assert error.mean() < x.abs().amax() / 16


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_makes_its_block_nan(kind, bad):
    """So the engine sees it; the other block of the row is as it was."""
    x = torch.ones(64)
    x[40] = bad
    read = decode(kind, encode(kind, x), 64)
    assert read[32:].isnan().all()
    torch.testing.assert_close(read[:32], torch.ones(32), rtol=0.01, atol=0)


def test_a_block_of_zeros_is_zeros():
    """No division by its scale of 0."""
    for kind in KINDS:
        assert not decode(kind, encode(kind, -torch.zeros(32)), 32).any()


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_the_rotation_is_the_hadamard_matrix(size):
    """Entry (i, j) is the sign of the parity of i & j, over sqrt(size), for each run of the numbers."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    matrix = torch.tensor(signs).double() / size**0.5
    x = torch.randn(5, 3 * size, generator=torch.Generator().manual_seed(size))
    want = (x.double().view(5, 3, size) @ matrix).view(5, -1)
    torch.testing.assert_close(rotate(x, size).double(), want, rtol=1e-5, atol=1e-5)
    assert rotate(x, 0) is x


def test_a_rotation_keeps_a_large_number_from_coarsening_its_block():
    """With one number 50 times the others, 4 bits after the rotation lose less than half as much of the others."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    x[:, 5] = 50
    others = torch.arange(128) != 5
    plain = decode("q4_0", encode("q4_0", x), 128)
    turned = rotate(decode("q4_0", encode("q4_0", rotate(x, 128)), 128), 128)
    near = torch.arange(128) // 32 == 0
    assert (turned - x)[:, others & near].norm() < 0.5 * (plain - x)[:, others & near].norm()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache": "q5"}, "bf16, q8_0, q4_0 for --kv-cache,"),
        ({"kv_cache": ""}, "for --kv-cache,"),
        ({"kv_cache_k": "Q8_0"}, "for --kv-cache-k"),
        ({"kv_cache_v": "int8"}, "for --kv-cache-v"),
        ({"kv_cache": "q8_0", "kv_cache_k": "q8_0", "kv_cache_v": "bf16"}, "leave --kv-cache out"),
    ],
)
def test_wrong_formats_are_refused(options, words):
    """The message names the option."""
    with pytest.raises(UserError, match=words):
        KVFormat.of(**options)
