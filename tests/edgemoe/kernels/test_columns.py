"""Columns that are coded with error feedback: the compiled function has the bits of torch's operations."""

from __future__ import annotations

import pytest
import torch
from availability import needs_native

from edgemoe.kernels.native.columns import code_columns
from edgemoe.storage.record.nested_codes import Block, ColumnOrder, nested_codes
from edgemoe.storage.record.offsets import MatrixSpec

pytestmark = needs_native


@pytest.mark.parametrize(
    ("importance", "bits"),
    [
        ({2: 1, 4: 4, 8: 16}, 8),
        ({2: 1, 4: 8, 8: 64}, 6),
        ({2: 1, 4: 4}, 8),
        *(({n: 1.0}, n) for n in (4, 5, 6)),
    ],
)
def test_codes_are_those_of_torch_bit_for_bit(importance, bits):
    """Of correlated inputs, with rows that strips of 32 do not divide, a constant group and one with an outlier."""
    generator = torch.Generator().manual_seed(bits)
    mixed = torch.randn(200, 160, generator=generator) @ torch.randn(160, 160, generator=generator)
    weight = torch.randn(72, 160, generator=generator) * 0.02
    weight[3, :32], weight[5, 40] = 0.01, 3
    spec, order = MatrixSpec.of("", 72, 160, 32), ColumnOrder(mixed.t() @ mixed, 160)
    plain = nested_codes(weight, order, spec, importance, bits)
    codes, parameters = nested_codes(weight, order, spec, importance, bits, code_columns)
    assert torch.equal(codes, plain[0])
    assert torch.equal(parameters, plain[1])


def test_other_sizes_are_refused():
    """A call takes rows in multiples of 8; the message has their number."""
    shape = [torch.zeros(size) for size in ((1, 64, 60), (64, 64), (64, 60), (64, 60))]
    block = Block(*shape, [4], {4: 1.0}, 8)
    with pytest.raises(ValueError, match="columns 0 to 64 of 60 rows"):
        code_columns(block, 0, 64, torch.zeros(64, 60, dtype=torch.uint8))
