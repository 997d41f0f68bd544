"""storage.compensators.low_rank: ranks within a budget, exact factors, and codes that are read as they were written."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgemoe.storage.compensators.geometry import GROUP, CompensatorGeometry, FactorArray
from edgemoe.storage.compensators.low_rank import (
    compensator,
    corrections,
    dequantize3,
    factor,
    pack,
    quantize3,
    refit,
    spectrum,
    unpack,
)
from edgemoe.storage.compensators.ranks import BUCKET, error_ranks, kurtosis, kurtosis_ranks
from edgemoe.storage.record.offsets import align
from edgemoe.storage.threads import one_core_each


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
def test_kurtosis_ranks_are_the_rule(kurtoses, mean, limit):
    """By falling kurtosis each takes the largest rank of the bucket within the budget, by an independent loop."""
    ranks = kurtosis_ranks(kurtoses, mean, limit)
    left = mean * len(kurtoses)
    for index in np.argsort(-np.array(kurtoses), kind="stable"):
        wanted = max(r for r in (min(rank, limit) for rank in BUCKET) if r <= left)
        assert ranks[index] == wanted
        left -= wanted
    assert left >= 0


def least_error(spectra: torch.Tensor, budget: int, block: int) -> float:
    """The most squared error that ranks within a budget take away, by trying every assignment."""
    best = {0: 0.0}
    for of_expert in spectra.double():
        gains = [[0.0, *projection.cumsum(0).tolist()] for projection in of_expert]
        found = dict[int, float]()
        for ranks in product(*(range(len(gain)) for gain in gains)):
            size, gain = -(-sum(ranks) // block) * block, sum(g[r] for g, r in zip(gains, ranks, strict=True))
            for used, before in best.items():
                if used + size <= budget:
                    found[used + size] = max(found.get(used + size, 0.0), before + gain)
        best = found
    return max(best.values())


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_error_ranks_stay_within_the_budget_and_near_the_least_error(seed, experts, limit, mean):
    """Where a rank costs one byte, no assignment of its size leaves less error; found by trying all."""
    mean = min(mean, limit)
    generator = torch.Generator().manual_seed(seed)
    spectra = torch.rand(experts, 2, limit, generator=generator).sort(descending=True).values
    ranks = error_ranks(spectra, sum, mean)
    assert sum(map(sum, ranks)) == mean * 2 * experts
    taken = sum(
        float(spectra[e, p, :r].sum()) for e, of_expert in enumerate(ranks) for p, r in enumerate(of_expert)
    )
    assert taken == pytest.approx(least_error(spectra, mean * 2 * experts, 1))


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(2, 5))
def test_error_ranks_pay_for_whole_blocks(seed, experts, block):
    """Ranks fill the blocks that they pay for; the error is above the optimum by less than one expert's."""
    generator = torch.Generator().manual_seed(seed)
    spectra = torch.rand(experts, 2, 4, generator=generator).sort(descending=True).values

    def size(ranks):
        return -(-sum(ranks) // block) * block

    ranks = error_ranks(spectra, size, 2)
    budget = size([2, 2]) * experts
    assert sum(map(size, ranks)) <= budget
    assert all(sum(each) % block == 0 or sum(each) == 8 for each in ranks)
    taken = sum(
        float(spectra[e, p, :r].sum()) for e, of_expert in enumerate(ranks) for p, r in enumerate(of_expert)
    )
    most_of_one = float(spectra.sum((1, 2)).max())
    assert taken >= least_error(spectra, budget, block) - most_of_one - 1e-6


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
    """The squared error of normal numbers, near the best 3-bit quantizer's with a scale for all (0.037)."""
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
    """3.25 bits per number in groups of 64, and padding: by the sizes written out."""
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


FAMILIES = {
    "mixtral": (4096, 14336),
    "qwen3-30b": (2048, 768),
    "qwen3-next": (2048, 512),
    "olmoe": (2048, 1024),
    "deepseek-v2-lite": (2048, 1408),
    "gpt-oss": (2880, 2880),
    "granite": (1536, 512),
    "demo": (256, 96),
}


@pytest.mark.e2e
@pytest.mark.parametrize(("hidden", "inner"), FAMILIES.values(), ids=FAMILIES)
def test_products_are_within_the_error_of_three_bits(hidden, inner):
    """x (U V)^T of factors in a compensator's bytes, on the shapes of the families, against float64 of the factors
    before quantization: off by what 3-bit codes lose, about a thirtieth of the square for each factor."""
    geometry = CompensatorGeometry(hidden, inner, (3, 5, 4))
    raw, whole, places = np.zeros(geometry.nbytes, np.uint8), {}, geometry.arrays
    for seed, (name, array) in enumerate(places.items()):
        whole[name] = normal(array.rows, array.columns, seed=seed)
        pack(*quantize3(whole[name]), array, raw)
    found = corrections(raw, geometry)
    for matrix, ranks in (("gate_up", (3, 5)), ("down", (4,))):
        u, v = whole[matrix, "u"].double().split(ranks), whole[matrix, "v"].double().split(ranks)
        x = normal(6, v[0].shape[1], seed=9)
        wanted = torch.cat([x.double() @ b.t() @ a for a, b in zip(u, v, strict=True)], 1)
        y = found[matrix].apply(x)
        error = float((y - wanted).square().sum() / wanted.square().sum())
        assert y.shape == wanted.shape
        assert 0.02 < error < 0.12
        assert torch.allclose(x @ found[matrix].weights().t(), y, rtol=1e-3, atol=1e-2)


def test_a_compensator_leaves_what_it_says():
    """The error that is left is W - U V with the factors as they are read, near the best ones' error."""
    errors = [normal(96, 256, seed=1), normal(96, 256, seed=2), normal(256, 96, seed=3)]
    geometry = CompensatorGeometry(256, 96, (20, 0, 9))
    raw, left = compensator(errors, geometry)
    read = corrections(raw, geometry)
    gate, up = read["gate_up"].weights().chunk(2)
    there = [errors[0] - gate, errors[1] - up, errors[2] - read["down"].weights()]
    assert left == pytest.approx(sum(float(each.square().sum()) for each in there), rel=1e-5)
    assert not up.any()
    best = sum(float(spectrum(e)[rank:].sum()) for e, rank in zip(errors, geometry.ranks, strict=True))
    taken = sum(float(each.square().sum()) for each in errors) - best
    assert best < left < best + 0.08 * taken
    again, _ = compensator(errors, geometry)
    assert np.array_equal(raw, again)


def test_an_error_of_a_smaller_rank_is_compensated_whole():
    """Ranks past the error's own have zero factors, and the rest is off by 3-bit codes alone."""
    errors = [
        normal(40, 2) @ normal(2, 70, seed=5),
        torch.zeros(40, 70),
        normal(70, 1) @ normal(1, 40, seed=6),
    ]
    geometry = CompensatorGeometry(70, 40, (8, 3, 8))
    _, left = compensator(errors, geometry)
    assert left < 0.08 * sum(float(each.square().sum()) for each in errors)


def test_refit_leaves_the_least_error():
    """The result is as by numpy's least squares in float64, for factors of full rank and with zeros."""
    error, u = normal(40, 60), normal(5, 40, seed=1)
    for factors in (u, u * torch.tensor([1.0, 0, 1, 0, 1]).unsqueeze(1)):
        want, *_ = np.linalg.lstsq(factors.t().double().numpy(), error.double().numpy(), rcond=1e-6)
        assert np.allclose(refit(factors, error).numpy(), want, atol=1e-6)
    assert refit(u[:0], error).shape == (0, 60)


def test_a_compensator_has_the_same_bytes_every_time():
    """A thousand times on two threads; torch's least squares gives other bits in some calls."""
    error, u = normal(24, 40) * 0.01, factor(normal(24, 40), 4)[0]
    with one_core_each(2) as pool:
        assert len(set(pool.map(lambda _: refit(u, error).numpy().tobytes(), range(1000)))) == 1
