"""Matrices of 4 bits in groups: the numbers of planes.quantize, whatever rows are taken or joined."""

from __future__ import annotations

import pytest
import torch

from edgemoe.storage.record.planes import dequantize, quantize
from edgemoe.storage.store import dense_groups, dense_shapes


@pytest.fixture(scope="module")
def weight():
    """A matrix of three blocks of rows and two groups, whose groups differ in size and centre."""
    generator = torch.Generator().manual_seed(55)
    return torch.randn(96, 128, generator=generator) * torch.rand(96, 1, generator=generator) + 0.1


@pytest.fixture(scope="module")
def numbers(weight):
    """The weights of level 4 by their definition."""
    return dequantize(*quantize(weight, 64), 4)


def test_a_matrix_has_the_numbers_of_level_4(weight, numbers, monkeypatch):
    """A weight has four and a half bits, also when it is coded in slices of rows."""
    matrix = dense_groups.quantize_groups(weight)
    assert matrix.nbytes == 96 * 128 * 4.5 / 8
    assert dense_groups.columns_of(matrix) == 128
    assert torch.equal(dense_groups.decoded(matrix), numbers)
    monkeypatch.setattr(dense_groups, "_SLICE", 5 * 128)
    assert torch.equal(dense_groups.quantize_groups(weight), matrix)


def test_rows_are_taken_and_joined_without_another_rounding(weight, numbers):
    """Some rows in another order, a slice, and two matrices one after another have the bits of the whole."""
    matrix, order = dense_groups.quantize_groups(weight), torch.randperm(96)[:64]
    assert torch.equal(dense_groups.decoded(dense_groups.rows_of(matrix, order)), numbers[order])
    assert torch.equal(dense_groups.slice_of(matrix, 32, 96), numbers[32:])
    parts = [dense_groups.quantize_groups(weight[rows]) for rows in (slice(64), slice(64, 96))]
    assert torch.equal(dense_groups.joined(parts), matrix)


def test_shapes_without_whole_blocks_and_groups_are_not_taken():
    """32 rows and 64 columns at a time."""
    assert dense_shapes.fits((32, 64))
    assert not any(map(dense_shapes.fits, [(48, 64), (32, 96), (64,), (0, 64), (32, 64, 64)]))
