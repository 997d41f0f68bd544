"""storage/record/encode.py and record.py: records against plain torch, and torch's kernel on a record's bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pairwise import pairwise
from record_codec import encode

from edgemoe.storage.base import ByteRange, Plane
from edgemoe.storage.record.decode import RecordCodes, decode
from edgemoe.storage.record.layout import LAYOUTS, detect
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.record.planes import dequantize, merge, midpoint, quantize

SHAPES = {
    "even": ((64, 128), (128, 32)),
    "odd": ((200, 100), (100, 100)),
    "tiny": ((2, 3), (3, 1)),
    "one block and a bit": ((80, 64), (48, 96)),
}


def geometry_of(shapes, max_level: int = 8) -> RecordGeometry:
    (a, b), (c, d) = shapes
    return RecordGeometry((MatrixSpec.of("gate_up", a, b), MatrixSpec.of("down", c, d)), max_level)


def weights_of(geometry: RecordGeometry, seed: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(m.rows, m.cols, generator=generator) for m in geometry.matrices]


def expected(weight: torch.Tensor, spec: MatrixSpec, level: int) -> torch.Tensor:
    """Computes the matrix at a level without packing: padded, quantized and truncated."""
    padded = torch.zeros(-(-spec.rows // 16) * 16, -(-spec.cols // spec.group) * spec.group)
    padded[: spec.rows, : spec.cols] = weight
    return dequantize(*quantize(padded, spec.group), level)[: spec.rows, : spec.cols]


@pairwise(shape=SHAPES, name=LAYOUTS, level=[8, 4, 2])
def test_a_records_prefix_holds_its_level(shape, name, level):
    """The bytes of a level's prefix decode to every quantized matrix, without padding."""
    geometry = geometry_of(SHAPES[shape])
    weights = weights_of(geometry)
    record = encode(geometry, LAYOUTS[name], weights)
    assert record.size == geometry.record_bytes
    got = decode(record[: geometry.prefix_bytes(level)].copy(), geometry, LAYOUTS[name], level)
    for matrix, weight, spec in zip(got, weights, geometry.matrices, strict=True):
        assert torch.equal(matrix, expected(weight, spec, level))


@pytest.mark.parametrize("max_level", [4, 2])
def test_a_record_without_higher_planes_is_a_prefix(max_level):
    """The record of a lower max_level is a prefix of the full record."""
    whole, part = geometry_of(SHAPES["odd"]), geometry_of(SHAPES["odd"], max_level)
    weights = weights_of(whole)
    record = encode(part, LAYOUTS["cpu-avx2"], weights)
    assert record.size == whole.prefix_bytes(max_level)
    assert np.array_equal(record, encode(whole, LAYOUTS["cpu-avx2"], weights)[: record.size])


def test_lower_planes_do_not_depend_on_lower_bits():
    """The codes of a level are the top bits of level 8's codes."""
    geometry = geometry_of(SHAPES["even"])
    record = encode(geometry, LAYOUTS["cuda"], weights_of(geometry))
    codes = {level: RecordCodes(geometry, LAYOUTS["cuda"]).unpack(record, level) for level in (8, 4, 2)}
    for eight, four, two in zip(codes[8], codes[4], codes[2], strict=True):
        assert torch.equal(four[0], eight[0] >> 4)
        assert torch.equal(two[0], (eight[0] >> 6) * 4 + 1)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_arrays_are_used_again(layout):
    """A record's codes do not depend on what the arrays held before, at any level."""
    geometry = geometry_of(SHAPES["odd"])
    first, second = (encode(geometry, layout, weights_of(geometry, seed)) for seed in (1, 2))
    used = RecordCodes(geometry, layout)
    for level in (8, 2, 4, 8):
        used.unpack(first, level)
        expected = RecordCodes(geometry, layout).unpack(second, level)
        for found, wanted in zip(used.unpack(second, level), expected, strict=True):
            assert all(map(torch.equal, found, wanted))


@pairwise(shape=SHAPES, level=[8, 4, 2], tokens=[1, 5, 17])
def test_torchs_kernel_computes_from_a_records_bytes(shape, level, tokens):
    """torch's 4-bit kernel on a record's planes computes products with the matrices of that level."""
    geometry = geometry_of(SHAPES[shape])
    record = encode(geometry, detect(), weights_of(geometry))
    base, d4 = np.split(record[geometry.parameter_bytes : geometry.prefix_bytes(4)], 2)
    p4 = np.concatenate((d4, base))
    (midpoint if level == 2 else merge)(p4)
    p0 = record[geometry.planes[Plane.D8].offset :]
    matrices = decode(record, geometry, detect(), level)
    for weight, (spec, parameters_at, codes_at) in zip(matrices, geometry.matrix_offsets(), strict=True):
        x = torch.randn(tokens, spec.cols, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        padded = F.pad(x, (0, spec.padded_cols - spec.cols))
        raw = record[parameters_at : parameters_at + spec.parameter_bytes].copy()
        shape = (spec.padded_cols // spec.group, spec.padded_rows, 2)
        scale, centre = torch.from_numpy(raw).view(torch.bfloat16).view(shape).unbind(-1)
        got = product(padded, p4, spec, codes_at, scale, centre + scale / 2 if level == 2 else centre)
        if level == 8:
            got = got + product(padded, p0, spec, codes_at, scale / 16, scale / 32)
        want = x.float() @ weight.T
        assert (got[:, : spec.rows] - want).norm() <= 0.01 * want.norm() + 1e-6


def product(x, nibbles, spec: MatrixSpec, at: int, scale, offset) -> torch.Tensor:
    """Computes float32 [tokens, padded_rows], the product of x and the matrix with packed nibbles at `at`."""
    packed = torch.from_numpy(nibbles[at : at + spec.nibble_bytes].copy()).view(spec.padded_rows, -1)
    parameters = torch.stack((scale, offset), -1).contiguous()
    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, spec.group, parameters).float()


def test_a_real_models_expert_takes_eight_and_a_half_bits():
    """[1536, 2048] and [2048, 768] take 8.5, 4.5 and 2.5 bits per weight, with padding."""
    geometry = geometry_of(((1536, 2048), (2048, 768)))
    weights = 1536 * 2048 + 2048 * 768
    assert {n: geometry.prefix_bytes(n) * 8 / weights for n in (8, 4, 2, 0)} == {8: 8.5, 4: 4.5, 2: 2.5, 0: 0}


side = st.integers(1, 5000)


@given(side, side, side, side, st.sampled_from([8, 4, 2]))
def test_planes_are_blocks_without_gaps(a, b, c, d, max_level):
    """Planes of any shapes are whole 4 KiB blocks, contiguous and large enough."""
    geometry = geometry_of(((a, b), (c, d)), max_level)
    at = 0
    for plane in geometry.planes:
        assert plane.offset == at
        assert plane.length % 4096 == 0
        at = plane.end
    assert geometry.record_bytes == at
    packed = sum(m.padded_rows * m.padded_cols // 4 for m in geometry.matrices)
    assert geometry.planes[0].length >= packed
    for spec, (rows, cols) in zip(geometry.matrices, ((a, b), (c, d)), strict=True):
        assert (spec.padded_rows % 16, spec.padded_cols % spec.group) == (0, 0)
        assert 0 <= spec.padded_rows - rows < 16
        assert 0 <= spec.padded_cols - cols < spec.group
    if max_level == 8:
        assert geometry.span(Plane.D4, Plane.D8) == ByteRange(
            geometry.prefix_bytes(2), at - geometry.prefix_bytes(2)
        )
