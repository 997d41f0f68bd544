"""storage/low_rank.py: ranks within a budget, exact factors, and codes that are read as they were written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from storage.compensator_index import GROUP, CompensatorGeometry, FactorArray
from storage.low_rank import (
    BUCKET,
    dequantize3,
    error_ranks,
    factor,
    kurtosis,
    kurtosis_ranks,
    pack,
    quantize3,
    spectrum,
    unpack,
)
from storage.record import align


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_kurtosis_of_known_distributions():
    """3 for a normal distribution, 9/5 for a uniform one, 1 for two values; a constant matrix has none."""
    assert kurtosis(normal(400, 500)) == pytest.approx(3, abs=0.05)
    assert kurtosis(torch.linspace(-1, 1, 100_000)) == pytest.approx(1.8, abs=1e-3)
    assert kurtosis(torch.tensor([5.0, 7.0, 5.0, 7.0])) == pytest.approx(1)
    assert kurtosis(torch.full((3, 4), 0.1)) == 0


@given(
    st.lists(st.floats(1, 100), min_size=1, max_size=40),
    st.integers(1, 300),
    st.integers(1, 1500),
)
def test_kurtosis_ranks_are_the_rule(kurtoses, mean, most):
    """By falling kurtosis each takes the largest rank of the bucket within the budget, by an independent loop."""
    ranks = kurtosis_ranks(kurtoses, mean, most)
    left = mean * len(kurtoses)
    for index in np.argsort(-np.array(kurtoses), kind="stable"):
        wanted = max(r for r in (min(rank, most) for rank in BUCKET) if r <= left)
        assert ranks[index] == wanted
        left -= wanted
    assert left >= 0


@given(st.integers(0, 1000), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3))
def test_error_ranks_leave_the_least_error(seed, count, most, step):
    """No other assignment of multiples of the step within the budget has a smaller error; found by trying all."""
    spectra = (
        torch.rand(count, most, generator=torch.Generator().manual_seed(seed)).sort(descending=True).values
    )
    mean = 1 + seed % most
    ranks = error_ranks(spectra, mean, step)
    assert sum(ranks) <= mean * count
    assert all(0 <= rank <= most and (rank % step == 0 or rank == most) for rank in ranks)
    if most % step == 0:  # an incomplete last step may cost the greedy rule its optimum
        gains = torch.cat((torch.zeros(count, 1), spectra.cumsum(1)), 1)
        best = {0: 0.0}
        for row in gains:
            best = {
                used + rank: max(
                    best[before] + float(row[r])
                    for before in best
                    for r in range(0, most + 1, step)
                    if before + r == used + rank
                )
                for used in best
                for rank in range(0, most + 1, step)
                if used + rank <= mean * count
            }
        assert sum(float(row[rank]) for row, rank in zip(gains, ranks, strict=True)) == pytest.approx(
            max(best.values())
        )


@pytest.mark.parametrize("shape", [(40, 100), (100, 40), (64, 64), (1, 5)])
def test_factors_are_the_best_of_their_rank(shape):
    """U V leaves the squared singular values past its rank, by torch's own decomposition, in float64."""
    error = normal(*shape)
    exact = torch.linalg.svdvals(error.double()).square()
    assert torch.allclose(spectrum(error).double(), exact, rtol=1e-4, atol=1e-4)
    for rank in {0, 1, min(shape) // 2, min(shape)}:
        u, v = factor(error, rank)
        assert (u.shape, v.shape) == ((rank, shape[0]), (rank, shape[1]))
        left = (error.double() - u.double().t() @ v.double()).square().sum()
        assert float(left) == pytest.approx(float(exact[rank:].sum()), rel=1e-4, abs=1e-3)
        assert torch.allclose(u.norm(dim=1), v.norm(dim=1), rtol=1e-3, atol=1e-3)


def test_a_zero_error_has_zero_factors():
    """No NaN from a residual that is exactly zero, as where a group is constant."""
    u, v = factor(torch.zeros(8, 12), 3)
    assert not v.any()
    assert torch.isfinite(u).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (5, 96), (16, 200), (0, 70)])
def test_codes_are_within_half_a_step(shape):
    """Numbers inside the range of the codes are off by at most half a scale; zeros and the padding are exact."""
    values = normal(*shape)
    values[:1] = 0
    codes, scales = quantize3(values)
    assert codes.shape == (shape[0], -(-shape[1] // GROUP), GROUP)
    assert set(codes.unique().tolist()) <= {*range(-4, 4)}
    back = dequantize3(codes, scales, codes.shape[1] * GROUP)
    assert not back[:, shape[1] :].any()
    assert not back[:1].any()
    wide = scales.float().repeat_interleave(GROUP, 1)[:, : shape[1]]
    inside = (values / wide.where(wide != 0, 1)).clamp(-4, 3) * wide
    assert ((back[:, : shape[1]] - inside).abs() <= wide.abs() / 2 + 1e-6).all()


def test_three_bits_lose_a_thirtieth():
    """The squared error of normal numbers, near that of the best 3-bit quantizer with a scale for all (0.037)."""
    values = normal(200, 640)
    codes, scales = quantize3(values)
    back = dequantize3(codes, scales, 640)
    assert float((back - values).square().mean()) < 0.035


@given(st.integers(0, 5), st.integers(1, 300), st.integers(0, 3), st.integers(0, 1 << 20))
def test_codes_are_read_as_they_were_written(rows, columns, at, seed):
    """unpack(pack(x)) is x, no byte outside of the array changes, and every bit is where the format says."""
    array = FactorArray(64 * at, rows, columns)
    random = np.random.default_rng(seed)
    codes = torch.from_numpy(random.integers(-4, 4, (rows, array.groups, GROUP)).astype(np.int8))
    scales = torch.from_numpy(random.normal(size=(rows, array.groups)).astype(np.float32)).bfloat16()
    raw = np.zeros(array.end + 64, np.uint8)
    pack(codes, scales, array, raw)
    signed, found = unpack(raw, array)
    assert torch.equal(signed, codes)
    assert torch.equal(found, scales)
    assert not raw[: array.offset].any()
    assert not raw[array.end :].any()
    if rows:
        row, group, i = (int(random.integers(n)) for n in (rows, array.groups, GROUP))
        at = array.codes.offset + 24 * (row * array.groups + group) + 3 * (i % 8)
        lane = int.from_bytes(raw[at : at + 3].tobytes(), "little")
        assert lane >> 3 * (i // 8) & 7 == codes[row, group, i] + 4


def test_a_compensator_has_the_bytes_of_its_ranks():
    """3.25 bits a number in groups of 64, and padding: by the sizes written out."""
    geometry = CompensatorGeometry(hidden=256, inner=96, ranks=(16, 0, 40))
    rows = {
        ("gate_up", "v"): (16, 4),
        ("gate_up", "u"): (16, 2),
        ("down", "v"): (40, 2),
        ("down", "u"): (40, 4),
    }
    total = sum(align(r * g * 24, 64) + align(r * g * 2, 64) for r, g in rows.values())
    assert {name: (a.rows, a.groups) for name, a in geometry.arrays.items()} == rows
    assert (geometry.used, geometry.nbytes) == (total, align(total))
    assert CompensatorGeometry(256, 96, (0, 0, 0)).nbytes == 0
