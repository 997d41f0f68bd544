"""Matrices of 4 to 6 bits in groups: the numbers of planes.quantize, whatever rows are taken or joined."""

from __future__ import annotations

import pytest
import torch

from edgemoe.storage.record.planes import dequantize, quantize
from edgemoe.storage.store import dense_groups, dense_shapes

BITS = pytest.mark.parametrize("bits", [4, 5, 6])


@pytest.fixture(scope="module")
def weight():
    """A matrix of three blocks of rows and two groups, whose groups differ in size and centre."""
    generator = torch.Generator().manual_seed(55)
    return torch.randn(96, 128, generator=generator) * torch.rand(96, 1, generator=generator) + 0.1


def numbers_of(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The weights by their definition: the middle of all codes with the same upper bits."""
    return dequantize(*quantize(weight, 64), bits)


@BITS
def test_a_matrix_has_the_numbers_of_its_upper_bits(weight, bits, monkeypatch):
    """A weight has half a bit more for the group, also when it is coded in slices of rows."""
    matrix = dense_groups.quantize_groups(weight, bits)
    assert matrix.nbytes == 96 * 128 * (bits + 0.5) / 8
    shape = tuple(matrix.shape)
    assert (dense_groups.columns_of(matrix), dense_shapes.bits_of(shape)) == (128, bits)
    assert shape == dense_shapes.stored_shape((96, 128), bits)
    assert dense_shapes.matrix_shape(("U8", shape)) == (96, 128)
    assert torch.equal(dense_groups.decoded(matrix), numbers_of(weight, bits))
    monkeypatch.setattr(dense_groups, "_SLICE", 5 * 128)
    assert torch.equal(dense_groups.quantize_groups(weight, bits), matrix)


@BITS
def test_rows_are_taken_and_joined_without_another_rounding(weight, bits):
    """Some rows in another order, a slice, and two matrices one after another have the bits of the whole."""
    matrix, order = dense_groups.quantize_groups(weight, bits), torch.randperm(96)[:64]
    numbers = numbers_of(weight, bits)
    assert torch.equal(dense_groups.decoded(dense_groups.rows_of(matrix, order)), numbers[order])
    assert torch.equal(dense_groups.slice_of(matrix, 32, 96), numbers[32:])
    parts = [dense_groups.quantize_groups(weight[rows], bits) for rows in (slice(64), slice(64, 96))]
    assert torch.equal(dense_groups.joined(parts), matrix)
    some = torch.tensor([95, 0, 17, 8, 40, 40])
    assert torch.equal(dense_groups.looked_up(matrix, some), numbers[some])


def test_shapes_without_whole_blocks_and_groups_are_not_taken():
    """32 rows and 64 columns at a time."""
    assert dense_shapes.fits((32, 64))
    assert not any(map(dense_shapes.fits, [(48, 64), (32, 96), (64,), (0, 64), (32, 64, 64)]))
