"""edgemoe/kernels/native/cuda_layout.py: a token's products with planes in layout cuda, against decoded weights."""

from __future__ import annotations

import pytest
import torch
from plane_experts import ACTIVATION, SHAPES, an_expert, applied
from record_codec import decode

from edgemoe.kernels.base import Part
from edgemoe.kernels.native import cuda_layout as slabs
from edgemoe.kernels.native import library as native
from storage.layout import LAYOUTS

pytestmark = pytest.mark.skipif(not native.available(), reason="no compiled kernel on this machine")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("level", [8, 4, 2])
def test_every_level_matches_the_reference(shape, level):
    """Slabs and groups of 64 and of 32 columns give the decoded weights' product to bf16's rounding."""
    geometry, record, blocks = an_expert(shape, "cuda")
    up, down = decode(record, geometry, LAYOUTS["cuda"], level)
    x = torch.randn(3, up.shape[1], generator=torch.Generator().manual_seed(level)).bfloat16()
    want = ACTIVATION.apply((x.float() @ up.T).bfloat16()).float() @ down.T
    kernel = slabs.SlabExpertKernel(geometry, LAYOUTS["cuda"])
    got = applied(kernel, x, [Part(blocks[level], level, level, 1)] * 3)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=0.01, atol=0.01 * want.abs().max().item())


def test_a_rows_bits_depend_on_the_row_only():
    """They depend neither on the other rows of a call nor on resident planes above its level."""
    geometry, _, blocks = an_expert("odd", "cuda")
    kernel = slabs.SlabExpertKernel(geometry, LAYOUTS["cuda"])
    levels = [(8, 8), (4, 2), (8, 4), (2, 2)]
    x = torch.randn(8, 100).bfloat16()
    parts = [Part(blocks[h], h, level, 2) for h, level in levels]
    together = applied(kernel, x, parts)
    for row, part in enumerate(p for p in parts for _ in range(2)):
        alone = Part(blocks[part.level], part.level, part.level, 1)
        assert torch.equal(together[row : row + 1], applied(kernel, x[row : row + 1], [alone]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_activation_reaches_every_result(value):
    """A NaN or infinity in a row of x makes the whole row of y non-finite."""
    geometry, _, blocks = an_expert("odd", "cuda")
    x = torch.zeros(1, 100).bfloat16()
    x[0, 70] = value
    got = applied(slabs.SlabExpertKernel(geometry, LAYOUTS["cuda"]), x, [Part(blocks[4], 4, 4, 1)])
    assert not torch.isfinite(got).any()


def test_other_layouts_are_refused():
    """The kernel reads layout cuda only."""
    with pytest.raises(ValueError, match="cuda"):
        slabs.SlabExpertKernel(an_expert("odd", "cuda")[0], LAYOUTS["cpu-avx2"])
