"""layers.embedding: rows of tables in groups, by torch and by the compiled kernel."""

from __future__ import annotations

import ctypes

import pytest
import torch
from availability import needs_native

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.decoder_parts import NativeOuterLayers, outer_layers
from edgemoe.layers.embedding import DenseEmbedding
from edgemoe.storage.record.planes import dequantize, quantize
from edgemoe.storage.store import dense_groups


@needs_native
@pytest.mark.parametrize("bits", [4, 5, 6])
def test_rows_in_groups_are_looked_up_without_another_rounding(bits):
    """Rows of each part of a block have the numbers of planes.dequantize, in bf16, with a factor or without."""
    weight = torch.randn(96, 192, generator=torch.Generator().manual_seed(3))
    exact = dequantize(*quantize(weight, 64), bits)
    table = dense_groups.quantize_groups(weight, bits)
    ids = torch.tensor([[0, 95, 17], [8, 40, 31]])
    assert torch.equal(DenseEmbedding(table, None)(ids), exact[ids].bfloat16())
    assert torch.equal(DenseEmbedding(table, None, torch.tensor(8.0))(ids), exact[ids].bfloat16() * 8)
    parts = NativeOuterLayers(table, None, (torch.ones(192).bfloat16(), 1e-6), (table, None, None))
    structure, hidden = outer_layers(parts), torch.zeros(192, dtype=torch.bfloat16)
    for row in range(96):
        assert (
            native.library().edgemoe_embed(ctypes.byref(structure), row, hidden.data_ptr(), hidden.numel())
            == 0
        )
        assert torch.equal(hidden, exact[row].bfloat16())
    structure.rows = 80
    assert native.library().edgemoe_embed(ctypes.byref(structure), 0, hidden.data_ptr(), hidden.numel()) < 0
