"""Blocks of an expert in memory: planes read, merged and promoted, against the plain decoder."""

from __future__ import annotations

import numpy as np
import pytest
from pairwise import pairwise
from records import KEY, MemoryReader, a_store, blocks_for

from edgemoe.storage.base import Plane, Source
from edgemoe.storage.record.encode import quantize_matrix
from edgemoe.storage.record.forms import P0, P4, MergedForm, PlaneForm, WholeForm
from edgemoe.storage.record.layout import LAYOUTS, Layout
from edgemoe.storage.record.offsets import RecordGeometry
from edgemoe.storage.record.planes import split


def nibbles_of(weights, geometry: RecordGeometry, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Packs p4 and p0 from the codes, without planes."""
    p4, p0 = np.zeros(geometry.codes_bytes, np.uint8), np.zeros(geometry.codes_bytes, np.uint8)
    for (spec, _, at), weight in zip(geometry.matrix_offsets(), weights, strict=True):
        codes, _ = quantize_matrix(weight, spec)
        first, last = at // layout.pieces, (at + spec.nibble_bytes) // layout.pieces
        for array, nibbles in ((p4, codes >> 4), (p0, codes & 15)):
            packed = layout.pack(nibbles).numpy().reshape(layout.pieces, -1)
            array.reshape(layout.pieces, -1)[:, first:last] = packed
    return p4, p0


SHAPES = [((48, 64), (64, 24)), ((200, 100), (100, 100))]
"""Rows and columns of both matrices: sizes that blocks and groups divide, and others."""

USED = ["cpu-avx512", "cpu-avx2", "cpu-generic", "cpu-avx2-paired"]
STORED = ["cpu-avx512", "cpu-avx2", "cpu-avx2-paired", "cuda"]
FORMS = [MergedForm, PlaneForm]


@pytest.fixture(params=SHAPES, ids=["even", "odd"])
def shape(request):
    return request.param


@pytest.fixture(params=USED)
def layout(request):
    return LAYOUTS[request.param]


@pairwise(shape=SHAPES, layout=USED, stored=STORED, level=[2, 4, 8], indirect=["layout"])
def test_planes_equal_the_codes_in_the_used_layout(shape, layout, stored, level):
    """Every plane of a store of any layout equals the plane of a record in the used layout."""
    geometry, weights, record = a_store(shape, LAYOUTS[stored])
    form = PlaneForm(geometry, LAYOUTS[stored], layout)
    into = blocks_for(form, level)
    assert form.fill(MemoryReader(record, geometry), KEY, level, into, None) == geometry.prefix_bytes(level)
    p4, p0 = nibbles_of(weights, geometry, layout)
    base, d4 = split(p4)
    at = geometry.parameter_bytes
    assert bytes(into["base"][:at]) == record[:at].tobytes()
    want = {"base": base, "d4": d4, "d8": p0}
    for name, block in into.items():
        assert bytes(block[at:] if name == "base" else block) == want[name].tobytes()


def test_half_the_bits_take_half_the_memory(shape, layout):
    """With one block per plane, an expert occupies the bytes of its prefix on disk."""
    geometry, _, _ = a_store(shape, layout)
    form = PlaneForm(geometry, layout, layout)
    assert [form.bytes_at(level) for level in (2, 4, 8)] == [geometry.prefix_bytes(n) for n in (2, 4, 8)]
    assert [form.demoted(8, level) for level in (0, 2, 4)] == [0, 2, 4]


@pairwise(shape=SHAPES, layout=USED, stored=STORED, indirect=["layout"])
def test_level_8_is_the_codes_in_the_used_layout(shape, layout, stored):
    """Resident nibbles of a store of any layout are the codes in the used layout."""
    geometry, weights, record = a_store(shape, LAYOUTS[stored])
    form = MergedForm(geometry, LAYOUTS[stored], layout)
    into = blocks_for(form, 8)
    assert form.fill(MemoryReader(record, geometry), KEY, 8, into, None) == geometry.record_bytes
    p4, p0 = nibbles_of(weights, geometry, layout)
    assert bytes(into[P4][geometry.parameter_bytes :]) == p4.tobytes()
    assert bytes(into[P0]) == p0.tobytes()


def test_level_2_has_the_top_bits_and_a_fixed_middle(shape, layout):
    """A level 2 expert reads only base, and its nibbles are 4 * (code >> 6) + 1."""
    geometry, weights, record = a_store(shape, layout)
    form, reader = MergedForm(geometry, layout, layout), MemoryReader(record, geometry)
    into = blocks_for(form, 2)
    form.fill(reader, KEY, 2, into, None)
    assert reader.reads == [(Plane.BASE, Plane.BASE)]
    p4, _ = nibbles_of(weights, geometry, layout)
    assert bytes(into[P4][geometry.parameter_bytes :]) == ((p4 & 0xCC) | 0x11).tobytes()


@pairwise(
    form_class=FORMS,
    shape=SHAPES,
    layout=USED,
    stored=["cpu-avx512", "cpu-generic", "cuda"],
    levels=[(2, 4), (2, 8), (4, 8)],
    indirect=["layout"],
)
def test_promotion_reads_missing_planes_only_and_changes_no_source(form_class, shape, layout, stored, levels):
    """A promoted expert equals one read from disk, and the source's blocks keep their bytes."""
    resident, level = levels
    geometry, _, record = a_store(shape, LAYOUTS[stored])
    form, reader = form_class(geometry, LAYOUTS[stored], layout), MemoryReader(record, geometry)
    old, whole = blocks_for(form, resident), blocks_for(form, level)
    form.fill(reader, KEY, resident, old, None)
    form.fill(reader, KEY, level, whole, None)
    before = {name: bytes(block) for name, block in old.items()}
    into = {
        name: block
        for name, block in blocks_for(form, level).items()
        if name in form.rewritten(resident, level)
    }
    read = form.fill(reader, KEY, level, into, Source(resident, old))
    assert read == geometry.prefix_bytes(level) - geometry.prefix_bytes(resident)
    assert {name: bytes(block) for name, block in old.items()} == before
    assert {name: bytes(block) for name, block in (old | into).items()} == {
        n: bytes(b) for n, b in whole.items()
    }


@pairwise(
    form_class=FORMS,
    shape=SHAPES,
    layout=USED,
    levels=[(2, 2), (4, 4), (8, 8), (8, 4), (4, 8), (2, 4)],
    indirect=["layout"],
)
def test_a_move_between_tiers_copies_resident_planes(form_class, shape, layout, levels):
    """An expert from another tier's blocks equals one from disk; only missing planes are read."""
    resident, level = levels
    geometry, _, record = a_store(shape, layout)
    form, reader = form_class(geometry, layout, layout), MemoryReader(record, geometry)
    other, whole, into = blocks_for(form, resident), blocks_for(form, level), blocks_for(form, level)
    form.fill(reader, KEY, resident, other, None)
    form.fill(reader, KEY, level, whole, None)
    read = form.fill(reader, KEY, level, into, Source(resident, other))
    assert read == max(geometry.prefix_bytes(level) - geometry.prefix_bytes(resident), 0)
    assert {name: bytes(block) for name, block in into.items()} == {n: bytes(b) for n, b in whole.items()}


def test_a_store_of_four_bits_has_no_p0(shape, layout):
    """A store without d8 has no p0 block."""
    geometry, _, _ = a_store(shape, layout, max_level=4)
    assert [kind.name for kind in MergedForm(geometry, layout, layout).kinds] == [P4]


@pairwise(form_class=FORMS, shape=SHAPES, layout=USED, levels=[(2, 4), (4, 8), (2, 8)], indirect=["layout"])
def test_a_whole_promotion_reads_everything_again(shape, layout, form_class, levels):
    """All blocks are new and equal to an absent expert's; as many bytes are read; no level is a part."""
    before, level = levels
    geometry, _, record = a_store(shape, layout)
    form = WholeForm(form_class(geometry, layout, layout))
    low, high, fresh = (blocks_for(form, at) for at in (before, level, level))
    reader = MemoryReader(record, geometry)
    form.fill(reader, KEY, before, low, None)
    kept = {name: bytes(block) for name, block in low.items()}
    assert form.rewritten(before, level) == tuple(kind.name for kind in form.kinds_at(level))
    assert form.fill(reader, KEY, level, high, Source(before, low)) == geometry.prefix_bytes(level)
    form.fill(reader, KEY, level, fresh, None)
    assert {name: bytes(block) for name, block in high.items()} == {n: bytes(b) for n, b in fresh.items()}
    assert {name: bytes(block) for name, block in low.items()} == kept
    assert [form.demoted(level, low) for low in (0, 2, level)] == [0, level, level]


@pairwise(form_class=FORMS, shape=SHAPES, layout=USED, indirect=["layout"])
def test_a_whole_expert_moves_without_a_read(shape, layout, form_class):
    """A source at the level is copied, as in the wrapped form."""
    geometry, _, record = a_store(shape, layout)
    form = WholeForm(form_class(geometry, layout, layout))
    source, into = blocks_for(form, 8), blocks_for(form, 8)
    reader = MemoryReader(record, geometry)
    form.fill(reader, KEY, 8, source, None)
    assert form.fill(reader, KEY, 8, into, Source(8, source)) == 0
    assert {name: bytes(block) for name, block in into.items()} == {n: bytes(b) for n, b in source.items()}
