"""Experts as affine codes, and their symmetric integers, against the plain codec and float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from record_codec import encode

from edgemoe.errors import UserError
from edgemoe.storage.export.checkpoint import pack
from edgemoe.storage.export.matrices import Affine, StoreExperts
from edgemoe.storage.export.symmetric import int4, int8
from edgemoe.storage.formats.base import fields
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.record.planes import quantize
from edgemoe.storage.store.writer import StoreWriter

ROWS, COLS = (80, 48), (48, 80)
"""gate_up and down: neither rows nor columns are whole blocks."""


@pytest.fixture(scope="module", params=LAYOUTS)
def store(request, tmp_path_factory):
    """A store of one layer of two experts in a layout, with their records."""
    torch.manual_seed(3)
    geometry = RecordGeometry((MatrixSpec.of("gate_up", *ROWS), MatrixSpec.of("down", *COLS)), 8)
    layout = LAYOUTS[request.param]
    records = [encode(geometry, layout, [torch.randn(ROWS), torch.randn(COLS) + 0.3]) for _ in range(2)]
    directory = tmp_path_factory.mktemp("export") / request.param
    with StoreWriter(directory, geometry=geometry, layout=layout, source="f00d", dense_bits=16) as writer:
        writer.write_layer(3, 2, records)
        writer.write_dense({}, [])
        manifest = writer.finish()
    return directory, manifest, records


@pytest.mark.parametrize("level", [8, 4, 2])
def test_an_expert_has_the_weights_of_its_level(store, level):
    """Gate, up and down are the matrices that the plain codec decodes, in every layout."""
    directory, manifest, records = store
    with StoreExperts(directory, manifest) as experts:
        for number, record in enumerate(records):
            gate, up, down = (each.weights() for each in experts.read(3, number, level))
            expected = decode(record, manifest.geometry, LAYOUTS[manifest.layout], level)
            for found, wanted in zip((torch.cat((gate, up)), down), expected, strict=True):
                assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("source", [8, 4])
@pytest.mark.parametrize("level", [8, 4, 2, 0])
def test_a_matrix_at_a_lower_level_is_that_which_the_store_has(store, source, level):
    """A level has one content, read alone or lowered from a higher one; a matrix's own level changes nothing."""
    directory, manifest, records = store
    level = min(level, source)
    with StoreExperts(directory, manifest) as experts:
        lowered = [each.at(level).weights() for each in experts.read(3, 1, source)]
        twice = [each.at(level).at(level).weights() for each in experts.read(3, 1, source)]
    expected = decode(records[1], manifest.geometry, LAYOUTS[manifest.layout], level) if level else None
    for found, again in zip(lowered, twice, strict=True):
        assert torch.equal(found, again)
    for found, wanted in zip((torch.cat(lowered[:2]), lowered[2]), expected or (), strict=bool(level)):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert level or not any(weights.any() for weights in lowered)


def test_a_skipped_expert_has_no_weights(store):
    """Level 0 adds nothing to the layer's output."""
    directory, manifest, _ = store
    with StoreExperts(directory, manifest) as experts:
        assert all(not each.weights().any() for each in experts.read(3, 0, 0))


def test_a_level_above_the_store_is_refused(store):
    """The message names the store's highest level."""
    directory, manifest, _ = store
    with StoreExperts(directory, manifest) as experts, pytest.raises(UserError, match="at most 8"):
        experts.read(3, 0, 16)


def affine(rows: int, cols: int, group: int, *, four: bool, centred: bool, seed: int) -> Affine:
    """A matrix of random weights in affine codes; `centred`: every other group has centre 0."""
    torch.manual_seed(seed)
    codes, parameters = quantize(torch.randn(rows, cols) + 0.2, group)
    scale, centre = parameters.float().transpose(0, 1).unbind(-1)
    centre = centre.clone()
    if centred:
        centre[:, ::2] = 0
    if four:
        return Affine(codes >> 4, scale.contiguous(), centre, 8.0, group)
    return Affine(codes, (scale / 16).contiguous(), centre, 135.5, group)


SHAPES = st.tuples(
    st.integers(1, 40), st.integers(1, 6), st.sampled_from([32, 64, 128]), st.integers(0, 1 << 30)
)


@given(SHAPES, st.booleans(), st.sampled_from([4, 8]), st.sampled_from([1, 2]))
@settings(max_examples=40, deadline=None)
def test_symmetric_integers_are_within_half_a_scale(sizes, four, bits, parts):
    """No weight is cut or rounded further than to its neighbour, whatever the groups; scales are as stored."""
    rows, groups, group, seed = sizes
    matrix = affine(rows, groups * group, group, four=four, centred=False, seed=seed)
    narrow = group // parts if group > 32 else group
    made = int4(matrix, narrow) if bits == 4 else int8(matrix, narrow, torch.bfloat16)
    assert made.scale.dtype == torch.bfloat16
    error = (made.affine().weights() - matrix.weights()).abs().view(rows, -1, narrow)
    assert bool((error <= made.scale.float().unsqueeze(-1) * 0.502 + 1e-6).all())
    assert made.kept == 0


@given(SHAPES, st.booleans())
@settings(max_examples=40, deadline=None)
def test_groups_around_zero_keep_the_stores_codes(sizes, four):
    """Where the centre is 0, int4 has the codes and the scale of level 4; the other groups are quantized."""
    rows, groups, group, seed = sizes
    matrix = affine(rows, groups * group, group, four=four, centred=True, seed=seed)
    made = int4(matrix, group)
    own = matrix.codes if four else matrix.codes >> 4
    found, wanted = made.codes.view(rows, -1, group), own.view(rows, -1, group)
    assert torch.equal(found[:, ::2], wanted[:, ::2])
    scale = matrix.step * (1 if four else 16)
    assert torch.equal(made.scale[:, ::2].float(), scale[:, ::2])
    assert made.kept == rows * -(-groups // 2)


def test_a_negative_step_is_quantized_too():
    """GGUF sources have steps of either sign; the stored scale is positive."""
    matrix = affine(8, 64, 32, four=True, centred=False, seed=1)
    turned = Affine(matrix.codes, -matrix.step, matrix.centre, 8.0, 32)
    made = int4(turned, 32)
    assert bool((made.scale > 0).all())
    error = (made.affine().weights() - turned.weights()).abs().view(8, -1, 32)
    assert bool((error <= made.scale.float().unsqueeze(-1) * 0.502).all())


def test_float16_scales_never_cut_a_weight():
    """A scale is rounded up, so that the largest weight has a code."""
    matrix = affine(64, 256, 32, four=False, centred=False, seed=5)
    made = int8(matrix, 32, torch.float16, lowest=-127)
    largest = matrix.weights().view(64, -1, 32).abs().amax(-1)
    assert bool((made.scale.float() * 127 >= largest).all())
    assert int(made.codes.min()) >= 1


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_codes_come_back(bits):
    """The reader's own unpacking finds every code at its place."""
    codes = torch.randint(0, 1 << bits, (5, 64), dtype=torch.uint8)
    assert torch.equal(fields(pack(codes, bits).view(torch.int32), bits), codes)


@pytest.mark.e2e
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_reads_the_same_weights(bits):
    """The package that engines read such checkpoints with decompresses to the same weights."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    matrix = affine(48, 192, 64, four=bits == 4, centred=False, seed=2)
    made = int4(matrix, 32) if bits == 4 else int8(matrix, 32, torch.bfloat16)
    arguments = quantization.QuantizationArgs(
        num_bits=bits, type="int", symmetric=True, strategy="group", group_size=32
    )
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments, format="pack-quantized")
    state = {
        "weight_packed": pack(made.codes, bits).contiguous().view(torch.int32),
        "weight_scale": made.scale,
        "weight_shape": torch.tensor(made.codes.shape),
    }
    found = compressors.BaseCompressor.get_value_from_registry("pack-quantized").decompress(state, scheme)
    assert torch.equal(found["weight"].float(), made.affine().weights().bfloat16().float())
