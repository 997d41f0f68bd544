"""Codes of fewer than 8 bits: kept and coded again, in records of every layout, against their formula."""

from __future__ import annotations

import pytest
import torch

from edgemoe.storage.formats.source_codes import SourceCodes
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.encode import assemble, coding, quantize_matrix
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.offsets import BITS, MatrixSpec, RecordGeometry

MATRICES = (MatrixSpec.of("gate_up", 144, 96, 32), MatrixSpec.of("down", 80, 64, 32))
"""Rows in whole blocks of 32 and a rest of 16."""


def geometry(bits: tuple[int, int]) -> RecordGeometry:
    """A store whose layer 0 has these bits; its limits hold for layers 0 and 1 together."""
    return RecordGeometry.limited(MATRICES, {0: bits, 1: (4, 8)})


def source(spec: MatrixSpec, bits: int) -> SourceCodes:
    """Random codes with parameters that bf16 has, and centres of half a step."""
    codes = torch.randint(0, 1 << bits, (spec.rows, spec.cols), dtype=torch.uint8)
    scale = torch.rand(spec.rows, spec.cols // 32).add_(0.5).bfloat16().float()
    return SourceCodes(codes, scale, scale / 2, 32, bits)


@pytest.mark.parametrize("layout", ["cpu-avx2-paired", "cpu-avx2", "cuda"])
@pytest.mark.parametrize("bits", [(4, 5), (4, 6), (5, 8), (8, 4), (4, 4)])
def test_kept_codes_are_the_sources_weights(layout, bits):
    """w = (code - 2^(bits - 1)) scale + centre at the highest level, within the rounding of parameters to bf16."""
    torch.manual_seed(0)
    store = geometry(bits)
    own = store.of_layer(0)
    sources = [source(spec, each) for spec, each in zip(MATRICES, bits, strict=True)]
    made = [
        quantize_matrix(each, spec, *coding(own, i, each))
        for i, (spec, each) in enumerate(zip(own.matrices, sources, strict=True))
    ]
    record = assemble(own, LAYOUTS[layout], made)
    assert record.nbytes == own.record_bytes
    for each, got, b in zip(
        sources, decode(record, store, LAYOUTS[layout], own.max_level, 0), bits, strict=True
    ):
        steps = each.codes.float() - 2 ** (b - 1)
        expected = steps * each.scale.repeat_interleave(32, 1) + each.centre.repeat_interleave(32, 1)
        # A bf16 has 8 bits: parameters are off by 2^-9 of the largest code, and so are centres.
        assert (got - expected).abs().max() < 2 ** (b - 9) * each.scale.max()


@pytest.mark.parametrize("bits", BITS)
def test_coding_again_halves_the_error_with_each_bit(bits):
    """Errors are distributed evenly over a step, the group's range / (2^bits - 1), and none is larger."""
    torch.manual_seed(0)
    store = geometry((4, bits)) if bits > 4 else RecordGeometry.limited(MATRICES, {0: (5, 4), 1: (4, 8)})
    own, weight = store.of_layer(0), torch.randn(80, 64)
    made = quantize_matrix(weight, own.matrices[1], *coding(own, 1, weight))
    other = quantize_matrix(torch.zeros(144, 96), own.matrices[0], *coding(own, 0, torch.zeros(1)))
    record = assemble(own, LAYOUTS["cuda"], [other, made])
    got = decode(record, store, LAYOUTS["cuda"], 8, 0)[1]
    groups = weight.view(80, 2, 32)
    step = (groups.amax(-1) - groups.amin(-1)) / ((1 << bits) - 1)
    errors = (got.view(80, 2, 32) - groups).abs() / step.unsqueeze(-1)
    assert errors.max() < 0.55
    assert errors.square().mean() == pytest.approx(1 / 12, rel=0.1)


def test_planes_are_as_long_as_their_bits():
    """d8 has 1 and 2 bits per weight for 5 and 6 bits; a layer without more than 4 bits has no d8."""
    lengths = [geometry((4, bits)).of_layer(0).low_places()[0][3] for bits in (5, 6, 8)]
    assert lengths == [80 * 64 // 8, 80 * 64 // 4, 80 * 64 // 2]
    assert len(geometry((4, 4)).of_layer(0).planes) == 2
    assert geometry((4, 5)).of_layer(1) == geometry((4, 5))
