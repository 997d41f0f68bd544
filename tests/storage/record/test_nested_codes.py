"""Codes with error feedback: against a search over all codes, rounding to nearest, and the products they are for."""

from __future__ import annotations

import itertools

import pytest
import torch

from edgemoe.storage.record.encode import quantize_matrix
from edgemoe.storage.record.nested_codes import ColumnOrder, nested_codes
from edgemoe.storage.record.offsets import MatrixSpec
from edgemoe.storage.record.planes import dequantize

LEVELS = (2, 4, 8)
LOW, HIGH = {2: 1, 4: 4, 8: 16}, {2: 1, 4: 8, 8: 64}


def correlated(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Inputs that share a few directions, as hidden states do, and whose columns differ in size."""
    chance = torch.Generator().manual_seed(seed)
    shared = torch.randn(rows, 8, generator=chance) @ torch.randn(8, columns, generator=chance)
    sizes = torch.rand(columns, generator=chance) + 0.1
    return (shared + torch.randn(rows, columns, generator=chance)) * sizes


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def errors(codes, weight: torch.Tensor, inputs: torch.Tensor) -> list[float]:
    """Mean squared error of the products at each level, in float64."""
    rows, columns = weight.shape
    out = []
    for level in LEVELS:
        kept = dequantize(*codes, level)[:rows, :columns]
        out.append(float(((kept - weight).double() @ inputs.double().t()).square().mean()))
    return out


def test_products_lose_less_than_with_codes_rounded_to_nearest():
    """On inputs that the codes were not made from; at 8 bits they lose more, and with HIGH little."""
    weight = weights(96, 128)
    spec = MatrixSpec.of("down", 96, 128, None)
    inputs = correlated(4096, 128, 1)
    seen, other = inputs[:2048], inputs[2048:]
    order = ColumnOrder(seen.t() @ seen, 128)
    nearest = errors(quantize_matrix(weight, spec), weight, other)
    low, high = (errors(nested_codes(weight, order, spec, each), weight, other) for each in (LOW, HIGH))
    assert low[0] < 0.5 * nearest[0]
    assert low[1] < 0.5 * nearest[1]
    assert high[1] < 0.5 * nearest[1]
    assert high[2] < low[2]
    assert high[2] < 0.05 * high[1]


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_codes_of_fewer_bits_keep_the_others_constant(bits):
    """Their products at level 8 lose less than with codes of as many bits that were rounded to nearest."""
    weight, inputs = weights(96, 128), correlated(4096, 128, 1)
    spec, seen, other = MatrixSpec.of("down", 96, 128, None), inputs[:2048], inputs[2048:]
    made = nested_codes(weight, ColumnOrder(seen.t() @ seen, 128), spec, HIGH, bits)
    nearest = quantize_matrix(weight, spec, bits, 8)
    assert (made[0] & ((1 << (8 - bits)) - 1)).unique().tolist() == [{4: 8, 5: 4, 6: 2}[bits]]
    assert errors(made, weight, other)[2] < errors(nearest, weight, other)[2]


def test_the_first_column_has_the_code_with_the_least_cost():
    """By a search over all 256 codes of a column to which no other column's error has been added."""
    weight = weights(16, 64)
    spec = MatrixSpec.of("down", 16, 64, None)
    inputs = correlated(256, 64, 2)
    order = ColumnOrder(inputs.t() @ inputs, 64)
    codes, parameters = nested_codes(weight, order, spec, LOW)
    first = int(order.columns[0])
    assert first == int((inputs**2).sum(0).argmax())
    every = {
        level: dequantize(
            torch.arange(256, dtype=torch.uint8).repeat(16, 1), parameters.expand(4, -1, -1), level
        )
        for level in LEVELS
    }
    scale = parameters[0, :, 0].float() / 16
    for row, code in itertools.product(range(16), [None]):
        steps = {level: (every[level][row] - weight[row, first]) / scale[row] for level in LEVELS}
        # Level 8 costs what the sixteen codes of a cell do not reach.
        cells = steps[8].view(16, 16).abs().amin(1).repeat_interleave(16)
        inside = (steps[8].view(16, 16)[:, 0] <= 0) & (steps[8].view(16, 16)[:, -1] >= 0)
        cells = cells.masked_fill(inside.repeat_interleave(16), 0)
        cost = LOW[2] * steps[2] ** 2 + LOW[4] * steps[4] ** 2 + LOW[8] * cells**2
        best = int(cost.view(16, 16)[:, 0].argmin())
        code = int(codes[row, first])
        assert code >> 4 == best
        assert (
            abs(float(steps[8][code])) <= abs(float(steps[8][16 * best : 16 * best + 16].abs().min())) + 1e-3
        )


@pytest.mark.parametrize("importance", [{2: 0, 4: 0, 8: 1}])
def test_without_correlation_and_lower_levels_codes_are_the_nearest(importance):
    """No column reaches another one, and only level 8 counts."""
    weight = weights(32, 64)
    spec = MatrixSpec.of("down", 32, 64, None)
    made = nested_codes(weight, ColumnOrder(torch.eye(64), 64), spec, importance)
    near = quantize_matrix(weight, spec)
    assert torch.equal(made[1], near[1])
    assert (made[0].int() - near[0].int()).abs().max() <= 1  # a tie may be rounded to the other side
    assert (made[0] != near[0]).float().mean() < 0.01


def test_an_expert_without_tokens_and_constant_groups_have_finite_weights():
    """A Hessian of zeros, a matrix with a constant row and group, and padding of rows and columns."""
    weight = weights(19, 40)
    weight[3], weight[5, :32] = 0.0, 0.25
    spec = MatrixSpec.of("down", 19, 40, None)
    for hessian in (torch.zeros(40, 40), correlated(64, 40, 3).t() @ correlated(64, 40, 3)):
        codes, parameters = nested_codes(weight, ColumnOrder(hessian, spec.padded_cols), spec, LOW)
        assert codes.shape == (spec.padded_rows, spec.padded_cols)
        kept = dequantize(codes, parameters, 8)
        assert kept.isfinite().all()
        assert torch.allclose(kept[:19, :40], weight, atol=0.02)
        assert kept[3].abs().max() == 0
        assert torch.allclose(kept[5, :32], torch.tensor(0.25))


def test_a_store_of_four_bits_has_upper_halves_alone():
    weight = weights(16, 64)
    spec = MatrixSpec.of("down", 16, 64, None)
    inputs = correlated(256, 64, 4)
    order = ColumnOrder(inputs.t() @ inputs, 64)
    codes, parameters = nested_codes(weight, order, spec, {2: 1, 4: 4})
    assert (codes & 15).max() == 0
    nearest = quantize_matrix(weight, spec)
    assert errors((codes, parameters), weight, inputs)[1] < 0.6 * errors(nearest, weight, inputs)[1]


def test_calls_with_the_same_arguments_give_the_same_bytes():
    weight, inputs = weights(32, 128), correlated(256, 128, 5)
    spec = MatrixSpec.of("down", 32, 128, None)
    hessian = inputs.t() @ inputs
    first = nested_codes(weight, ColumnOrder(hessian, 128), spec, LOW)[0]
    for _ in range(5):
        filler = torch.randn(7, 13)  # moves later allocations
        again = nested_codes(weight.clone(), ColumnOrder(hessian.clone(), 128), spec, LOW)[0]
        assert torch.equal(again, first)
        del filler
