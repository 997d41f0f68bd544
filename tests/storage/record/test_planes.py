"""storage/record/planes.py against the formulas of its docstring, computed weight by weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgemoe.storage.record.planes import (
    base_of,
    dequantize,
    merge,
    midpoint,
    quantize,
    split,
    truncate_to_base,
)


def value(code: int, scale: float, centre: float, level: int) -> float:
    """Computes a code's value at a level: the middle of the codes that share its top bits."""
    s = scale / 16
    middle = {8: code, 4: 16 * (code >> 4) + 7.5, 2: 64 * (code >> 6) + 31.5}[level]
    return (middle - 135.5) * s + centre


def nibbles(n: int = 32, seed: int = 0) -> np.ndarray:
    """A random nibble array of n bytes."""
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8)


def joined(p4: np.ndarray) -> np.ndarray:
    """Returns d4 | base of a nibble array, the operand of merge."""
    return np.concatenate(split(p4)[::-1])


@pytest.mark.parametrize("level", [8, 4, 2])
def test_dequantize_is_the_formula(level):
    """Every weight of a small matrix equals the formula on its code and parameters."""
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    codes, parameters = quantize(weight, 32)
    got = dequantize(codes, parameters, level)
    assert parameters.shape == (2, 5, 2)
    for n in range(5):
        for k in range(64):
            scale, centre = parameters[k // 32, n].tolist()
            assert got[n, k].item() == pytest.approx(
                value(int(codes[n, k]), scale, centre, level), rel=1e-5, abs=1e-6
            )


@settings(max_examples=40)
@given(
    hnp.arrays(np.float32, (3, 32), elements=st.floats(-1, 1, width=32)),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]),
    st.sampled_from([0.0, 1.0, -3.0, 1000.0]),
)
def test_level_8_is_off_by_half_a_step_at_most(weight, size, shift):
    """No weight is clipped, for any range of its group and any distance from zero."""
    w = (torch.from_numpy(weight) + shift) * size
    codes, parameters = quantize(w, 32)
    step = parameters.float()[0, :, 0:1] / 16
    # Steps below float32's smallest normal number are not distinguished: up to 120 of them precede a weight.
    noise = 1e-6 * w.abs().max() + 120 * torch.finfo(torch.float32).tiny
    assert ((dequantize(codes, parameters, 8) - w).abs() <= 0.5001 * step + noise).all()
    # The step is minimal for 256 codes over the range, except for the rounding of its two parameters.
    centre = parameters.float()[0, :, 1:2]
    reach = (w - centre).abs().amax(-1, keepdim=True)
    assert (step <= reach / 119.5 * 1.01 + noise).all()


@pytest.mark.parametrize("constant", [0.0, 1.0, -0.37, 1e-20, 3e8])
@pytest.mark.parametrize("level", [8, 4, 2])
def test_a_constant_group_is_as_good_as_bf16(constant, level):
    """A constant group keeps its value, up to bf16's rounding, at every level."""
    weight = torch.full((2, 32), constant)
    got = dequantize(*quantize(weight, 32), level)
    assert (got - weight).abs().max() <= abs(constant) / 128


def test_errors_on_gaussian_weights_equal_the_design():
    """The relative error is 0.0053 at level 8, 0.0878 at 4 and 0.352 at 2, in groups of 64."""
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    codes, parameters = quantize(weight, 64)
    errors = {
        level: ((dequantize(codes, parameters, level) - weight).norm() / weight.norm()).item()
        for level in (8, 4, 2)
    }
    assert errors == {
        8: pytest.approx(0.0053, rel=0.05),
        4: pytest.approx(0.0878, rel=0.05),
        2: pytest.approx(0.352, rel=0.05),
    }


@pytest.mark.parametrize("size", [16, 48, 1 << 18, (1 << 20) + 16])
def test_split_and_merge_are_inverse_beyond_one_chunk(size):
    """The merged planes equal the nibbles, for any length."""
    p4 = nibbles(size)
    planes = joined(p4)
    merge(planes)
    assert np.array_equal(planes, p4)


def test_split_gives_the_top_bits_to_base():
    """base has the upper two bits of every nibble and d4 the lower two."""
    p4 = nibbles()
    base, d4 = split(p4)

    def pairs(plane: np.ndarray) -> list[int]:
        return sorted((int(byte) >> shift) & 3 for byte in plane for shift in (0, 2, 4, 6))

    every = [(int(byte) >> shift) & 15 for byte in p4 for shift in (0, 4)]
    assert pairs(base) == sorted(n >> 2 for n in every)
    assert pairs(d4) == sorted(n & 3 for n in every)
    changed = p4 ^ np.uint8(0x33)  # the lower two bits of every nibble
    assert np.array_equal(split(changed)[0], base)
    assert not np.array_equal(split(changed)[1], d4)


@pytest.mark.parametrize("garbage", [0, 0xFF, 0x5A])
def test_midpoint_needs_base_only(garbage):
    """Every nibble becomes its top two bits and 01, for any bytes in d4's place."""
    p4 = nibbles(64)
    got = np.full(64, garbage, np.uint8)
    got[32:] = split(p4)[0]
    midpoint(got)
    for nibble, was in zip(_each(got), _each(p4), strict=True):
        assert nibble == 4 * (was >> 2) + 1


def test_base_of_is_equal_for_level_2_and_level_4():
    """base_of returns the base of the disk, from level 4's nibbles and from level 2's."""
    p4 = nibbles(64)
    base = split(p4)[0]
    level2 = np.concatenate((np.zeros(32, np.uint8), base))
    midpoint(level2)
    for source in (p4, level2):
        out = np.zeros(32, np.uint8)
        base_of(source, out)
        assert np.array_equal(out, base)


def test_truncating_level_4_gives_level_2s_nibbles():
    """Nibbles truncated to level 2 equal the nibbles of a level 2 expert."""
    p4 = nibbles(64)
    level2 = np.concatenate((np.zeros(32, np.uint8), split(p4)[0]))
    midpoint(level2)
    out = np.zeros(64, np.uint8)
    truncate_to_base(p4, out)
    assert np.array_equal(out, level2)


def _each(array: np.ndarray) -> list[int]:
    return [(int(byte) >> shift) & 15 for byte in array for shift in (0, 4)]
