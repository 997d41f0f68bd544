"""The CPU kernel against plain float arithmetic on decoded weights."""

from __future__ import annotations

import pytest
import torch
from records import KEY, MemoryReader, a_store, blocks_for

from edgemoe.kernels import cpu
from edgemoe.kernels.cpu import CpuExpertKernel
from storage.encode import decode
from storage.forms import CpuForm
from storage.layout import detect

SHAPES = [((48, 64), (64, 24)), ((200, 100), (100, 100)), ((1536, 256), (256, 768))]


def gate(both: torch.Tensor) -> torch.Tensor:
    first, second = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(first) * second


@pytest.fixture(params=SHAPES, ids=["small", "odd", "wide"])
def expert(request):
    layout = detect()
    geometry, weights, record = a_store(request.param, layout)
    form = CpuForm(geometry, layout, layout)
    blocks = {}
    for level in (8, 4, 2):
        blocks[level] = blocks_for(form, level)
        form.fill(MemoryReader(record, geometry), KEY, level, blocks[level], None)
    return geometry, record, blocks, weights


@pytest.mark.parametrize("level", [8, 4, 2])
@pytest.mark.parametrize("tokens", [1, 2, 7, 39, 40, 79, 80, 130])
def test_every_level_and_token_count_matches_the_reference(expert, level, tokens):
    """The output is the decoded weights' product in float32, to bf16's rounding."""
    geometry, record, blocks, _ = expert
    up, down = decode(record, geometry, detect(), level)
    x = torch.randn(tokens, up.shape[1], generator=torch.Generator().manual_seed(tokens)).bfloat16()
    want = gate(x.float() @ up.T) @ down.T
    got = CpuExpertKernel(geometry, detect()).forward(x, blocks[level], level, level, gate).float()
    assert got.shape == want.shape
    assert (got - want).norm() / want.norm() < 0.01


@pytest.mark.parametrize(("held", "level"), [(8, 4), (8, 2), (4, 2)])
@pytest.mark.parametrize("tokens", [1, 100])
def test_a_lower_level_from_higher_planes_is_bit_identical(expert, held, level, tokens):
    """Computing at a level gives the same bits whether or not higher planes happen to be resident."""
    geometry, _, blocks, _ = expert
    kernel = CpuExpertKernel(geometry, detect())
    x = torch.randn(tokens, geometry.matrices[0].cols).bfloat16()
    assert torch.equal(
        kernel.forward(x, blocks[held], held, level, gate),
        kernel.forward(x, blocks[level], level, level, gate),
    )


def test_errors_of_the_levels_are_those_of_the_format(expert):
    """The output's error against unquantized weights grows by level as the format promises."""
    geometry, _, blocks, (up, down) = expert
    x = torch.randn(64, up.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    want = gate(x.float() @ up.T) @ down.T
    kernel = CpuExpertKernel(geometry, detect())
    errors = {
        level: ((kernel.forward(x, blocks[level], level, level, gate) - want).norm() / want.norm()).item()
        for level in (8, 4, 2)
    }
    assert errors[8] < 0.02
    assert 0.05 < errors[4] < 0.25
    assert 0.3 < errors[2] < 0.9


def test_bf16_products_agree_with_float32_ones(expert, monkeypatch):
    """On a CPU with bf16 instructions the many-token way multiplies in bf16; the result stays the same to rounding."""
    geometry, _, blocks, _ = expert
    x = torch.randn(128, geometry.matrices[0].cols).bfloat16()
    outputs = []
    for fast in (False, True):
        monkeypatch.setattr(cpu, "fast_bf16", lambda fast=fast: fast)
        outputs.append(CpuExpertKernel(geometry, detect()).forward(x, blocks[8], 8, 8, gate).float())
    assert (outputs[0] - outputs[1]).norm() / outputs[0].norm() < 0.02
