"""Exactness of the product of one row: its integers, and what becomes of numbers that are no integers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from interpreter import DEVICE, NEEDS_TRITON, round_like_a_gpu

from edgemoe.kernels.triton.experts import VECTOR, launch_shape
from edgemoe.kernels.triton.matvec import matvec, rows_per_program
from edgemoe.kernels.triton.products import ITEM
from edgemoe.storage.record.offsets import MatrixSpec

pytestmark = [pytest.mark.triton, pytest.mark.gpu, NEEDS_TRITON]


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    round_like_a_gpu(monkeypatch)


UNITS = {2: 2, 4: 1, 8: 32}
"""Units of a level's codes in 1: 0.5, 1 and 1/32."""


class Planes:
    """A matrix of random planes, whose codes count units, in groups with scales that are powers of two."""

    def __init__(self, rows: int, cols: int, group: int) -> None:
        self.spec = spec = MatrixSpec.of("down", rows, cols, group)
        self.shape = launch_shape(spec, rows, "custom")
        generator = torch.Generator().manual_seed(cols)
        size = (self.shape.slabs, spec.padded_rows, self.shape.run)
        self.planes = torch.randint(0, 256, (4, *size), generator=generator, dtype=torch.uint8)
        powers = torch.randint(-1, 2, (spec.padded_cols // group, spec.padded_rows), generator=generator)
        self.scales = 2.0**powers
        self.centres = torch.randint(-3, 4, self.scales.shape, generator=generator).float()
        self.pairs = torch.stack([self.scales, self.centres], -1).bfloat16().to(DEVICE)
        self.on_device = self.planes.to(DEVICE)

    def weights(self, level: int) -> torch.Tensor:
        """float64 [rows, cols], by the definition of planes and of the layout cuda."""
        base, d4, even, odd = self.planes.long().unsqueeze(-2)
        run = torch.arange(4)[:, None]
        code = (base >> 2 * run) & 3
        if level > 2:
            code = 4 * code + ((d4 >> 2 * run) & 3)
        if level > 4:
            low = torch.where(run % 2 == 0, even, odd) >> 4 * (run // 2)
            code = 16 * code + (low & 15)
        stored = {2: 4.0 * code - 6.5, 4: code - 8.0, 8: code / 16 - 8.46875}[level]
        stored = stored.double().flatten(2).transpose(0, 1).flatten(1)
        scales, centres = (
            each.double().T.repeat_interleave(self.spec.group, 1) for each in (self.scales, self.centres)
        )
        return (stored * scales + centres)[: self.spec.rows, : self.spec.cols]

    def times(self, x: torch.Tensor, level: int) -> torch.Tensor:
        """float32 [rows]: the kernel's sums, not rounded."""
        addresses = [self.pairs.data_ptr(), *(plane.data_ptr() for plane in self.on_device)]
        items = torch.tensor([[*addresses, level, 0, 1]]).to(DEVICE)
        assert items.shape == (1, ITEM)
        y = torch.zeros(1, self.spec.rows, device=DEVICE)
        grid = (-(-self.spec.rows // rows_per_program(self.shape, VECTOR)), 1)
        matvec[grid](items, x.to(DEVICE), 0, y, self.shape, VECTOR, num_warps=VECTOR.warps)
        return y[0].cpu()


@pytest.mark.parametrize("level", [2, 4, 8])
@pytest.mark.parametrize(
    ("rows", "cols", "group"), [(24, 1100, 64), (16, 192, 32), (40, 96, 32), (8, 256, 128)]
)
def test_integers_are_added_exactly(rows, cols, group, level):
    """Integers of x between -128 and 128 give every bit of their product, in every size of slab and group."""
    matrix = Planes(rows, cols, group)
    x = torch.randint(-128, 129, (cols,), generator=torch.Generator().manual_seed(level))
    want = matrix.weights(level) @ x.double()
    assert torch.equal(matrix.times(x.bfloat16(), level).double(), want)


def test_a_number_changes_by_a_65536th_of_its_slabs_largest():
    """Numbers down to 2 ** -30, 2 ** 100 and 0 in slabs of their own: no product is farther off than that."""
    matrix = Planes(16, 256, 64)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 64, generator=generator) * 2.0 ** torch.randint(-30, 1, (4, 64), generator=generator)
    x = (x * torch.tensor([1, 2.0**100, 0, 2.0**-100])[:, None]).bfloat16()
    for slab in range(4):
        alone = torch.zeros_like(x)
        alone[slab] = x[slab]
        weights = matrix.weights(8)
        error = (matrix.times(alone.flatten(), 8).double() - weights @ alone.double().flatten()).abs()
        largest = x[slab].abs().max().double()
        assert (error <= weights.abs().sum(1) * largest * (2.0**-16 + 2.0**-22)).all()
    assert not matrix.times(torch.zeros(256, dtype=torch.bfloat16), 8).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_seen_in_every_element(bad):
    """NaN and infinities of x make the row of y NaN."""
    x = torch.ones(192).bfloat16()
    x[70] = bad
    assert Planes(16, 192, 32).times(x, 4).isnan().all()


def test_an_item_of_level_0_leaves_its_row():
    """An expert that is not computed keeps what is in its row of y."""
    matrix = Planes(16, 64, 64)
    assert not matrix.times(torch.ones(64).bfloat16(), 0).any()
