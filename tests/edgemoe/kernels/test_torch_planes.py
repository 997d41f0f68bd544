"""edgemoe/kernels/torch_planes.py against float32 products of decoded weights, from tensors and from bytes."""

from __future__ import annotations

import pytest
import torch
from pairwise import pairwise
from plane_experts import ACTIVATION, SHAPES, an_expert, applied
from records import a_store

from edgemoe.kernels.base import Part
from edgemoe.kernels.registry import compute
from edgemoe.kernels.torch_planes import PlaneExpertKernel
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.layout import LAYOUTS


def as_tensors(blocks):
    return {name: torch.frombuffer(bytearray(block), dtype=torch.uint8) for name, block in blocks.items()}


@pytest.mark.e2e
@pairwise(shape=SHAPES, layout=LAYOUTS, level=[8, 4, 2])
def test_every_layout_and_level_matches_the_reference(shape, layout, level):
    """Every layout gives the decoded weights' product to bf16's rounding."""
    geometry, record, blocks = an_expert(shape, layout)
    up, down = decode(record, geometry, LAYOUTS[layout], level)
    x = torch.randn(5, up.shape[1], generator=torch.Generator().manual_seed(level)).bfloat16()
    inner = ACTIVATION.apply((x.float() @ up.T).bfloat16())
    want = inner.float() @ down.T
    kernel = PlaneExpertKernel(geometry, LAYOUTS[layout])
    got = applied(kernel, x, [Part(blocks[level], level, level, 5)])
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=0.01, atol=0.01 * want.abs().max().item())


def test_tensors_and_bytes_give_the_same_bits():
    """Blocks that are tensors, as on a device, give the bits of blocks in RAM."""
    geometry, _, blocks = an_expert("odd", "cuda")
    kernel = PlaneExpertKernel(geometry, LAYOUTS["cuda"])
    x = torch.randn(3, 100).bfloat16()
    for level in (8, 4, 2):
        ram, device = (Part(b, level, level, 3) for b in (blocks[level], as_tensors(blocks[level])))
        assert torch.equal(applied(kernel, x, [ram]), applied(kernel, x, [device]))


def test_experts_give_the_same_bits_together_and_alone():
    """A row's bits depend neither on the other experts of a call nor on resident planes above its level."""
    geometry, _, blocks = an_expert("odd", "cuda")
    kernel = PlaneExpertKernel(geometry, LAYOUTS["cuda"])
    levels, sizes = [(8, 8), (4, 2), (8, 4), (2, 2)], [1, 33, 3, 20]
    x = torch.randn(sum(sizes), 100).bfloat16()
    parts = [Part(blocks[h], h, level, rows) for (h, level), rows in zip(levels, sizes, strict=True)]
    lowest = [Part(blocks[part.level], part.level, part.level, part.rows) for part in parts]
    alone = [applied(kernel, rows, [part]) for rows, part in zip(x.split(sizes), lowest, strict=True)]
    assert torch.equal(applied(kernel, x, parts), torch.cat(alone))


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_devices_read_planes_in_layout_cuda(device):
    """The choice of a GPU's kernel keeps planes as stored, in layout cuda, and needs no GPU."""
    chosen = compute(device)
    geometry, _, _ = a_store(SHAPES["small"], chosen.layout)
    assert chosen.layout == LAYOUTS["cuda"]
    assert [kind.name for kind in chosen.form(geometry, chosen.layout, chosen.layout).kinds] == [
        "base",
        "d4",
        "d8",
    ]
