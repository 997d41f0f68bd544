"""storage/store/manifest.py: a saved manifest is loaded again, and an invalid one is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_store import geometry

from edgemoe.errors import BadManifest, UserError
from edgemoe.storage.base import ByteRange
from edgemoe.storage.record.probes import PROBES
from edgemoe.storage.store.codes import CalibratedCodes
from edgemoe.storage.store.dense_choice import DenseChoice
from edgemoe.storage.store.manifest import MANIFEST_NAME, MARKER_NAME, Manifest
from edgemoe.storage.store.manifest_entries import FileEntry, LayerRecords, RecordEntry

SIZE = geometry().record_bytes
LAYER = LayerRecords(
    "experts-00003.safetensors", (RecordEntry(4096, (1, 2, 3)), RecordEntry(4096 + SIZE, (4, 5, 6)))
)
OTHER = LayerRecords("experts-00007.safetensors", (RecordEntry(8192, (7, 2**64 - 1, 0)),))
MANIFEST = Manifest(
    "cafe",
    "cpu-avx2",
    PROBES["cpu-avx2"],
    geometry(),
    8,
    {3: LAYER, 7: OTHER},
    {"config.json": FileEntry(12, 0xAB), "dense.safetensors": FileEntry(34, 0xCD)},
    codes=CalibratedCodes({2: 1, 4: 4}, "a.txt", 512, "0123abcd"),
    dense_choice=DenseChoice(0.002, {4: 0.003, 8: -1e-6}, 2048),
)
Content = dict[str, Any]


def load(tmp_path, content: Content) -> Manifest:
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(content))
    return Manifest.load(tmp_path)


def content() -> Content:
    return json.loads(MANIFEST.to_json())


def test_the_fingerprint_follows_every_value(tmp_path):
    """A loaded manifest has the saved one's; another plane's checksum, layout or file makes another."""
    MANIFEST.save(tmp_path / MANIFEST_NAME)
    assert Manifest.load(tmp_path).fingerprint == MANIFEST.fingerprint
    record = RecordEntry(4096, (1, 2, 4))
    others = [
        replace(MANIFEST, layers={3: LayerRecords(LAYER.file, (record, LAYER.records[1])), 7: OTHER}),
        replace(MANIFEST, layout="cuda", probe=PROBES["cuda"]),
        replace(MANIFEST, files={**MANIFEST.files, "config.json": FileEntry(12, 0xAC)}),
        replace(MANIFEST, dense_bits=16),
    ]
    assert len({each.fingerprint for each in [MANIFEST, *others]}) == 5


@pytest.mark.parametrize("level", [8, 4, 2])
def test_a_saved_manifest_is_loaded_again(tmp_path, level):
    """A loaded manifest equals the saved one, with gaps in layer numbers and any number of planes."""
    planes = {8: 3, 4: 2, 2: 1}[level]
    layer = LayerRecords("e", (RecordEntry(4096, (9,) * planes),))
    manifest = Manifest("s", "cuda", PROBES["cuda"], geometry(level), 16, {5: layer}, {})
    manifest.save(tmp_path / MANIFEST_NAME)
    assert Manifest.load(tmp_path) == manifest
    MANIFEST.save(tmp_path / MANIFEST_NAME)
    assert Manifest.load(tmp_path) == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


def test_the_file_has_the_documented_format():
    """Planes, requirements and checksums have their documented places in the JSON."""
    # [40, 100] in groups of 64 is padded to [48, 128], [100, 20] in groups of 32 to [112, 32].
    parameters = 48 * 2 * 4 + 112 * 1 * 4
    codes = (48 * 128 + 112 * 32) // 2
    assert (parameters, codes) == (832, 4864)
    assert content()["planes"] == [
        {"name": "base", "requires": [], "optional": False, "offset": 0, "length": 4096 + 4096},
        {"name": "d4", "requires": ["base"], "optional": False, "offset": 8192, "length": 4096},
        {"name": "d8", "requires": ["base", "d4"], "optional": False, "offset": 12288, "length": 8192},
    ]
    assert content()["layers"]["7"]["records"] == [[8192, "0000000000000007", "ffffffffffffffff", "0" * 16]]
    assert content()["files"]["config.json"] == [12, "00000000000000ab"]
    assert content()["format"] == 1


def test_two_thousand_records_stay_compact():
    """A record takes less than 80 bytes of JSON."""
    layers = {
        n: LayerRecords(f"e{n}", tuple(RecordEntry(4096 + SIZE * i, (2**63, 2**62, i)) for i in range(128)))
        for n in range(16)
    }
    manifest = Manifest("s", "cuda", PROBES["cuda"], geometry(), 16, layers, {})
    assert len(manifest.to_json()) < 80 * 2048


def test_unknown_planes_are_skipped_if_optional(tmp_path):
    """A newer plane marked optional, with its column of checksums, changes nothing for this reader."""
    new = content()
    end = geometry().record_bytes
    new["planes"].append(
        {"name": "lowrank", "requires": ["base"], "optional": True, "offset": end, "length": 4096}
    )
    for layer in new["layers"].values():
        for index, row in enumerate(layer["records"]):
            row[0] = 4096 + index * (end + 4096)
            row.append("00000000000000ff")
    loaded = load(tmp_path, new)
    assert loaded.geometry == geometry()
    assert [record.checksums for record in loaded.layers[3].records] == [(1, 2, 3), (4, 5, 6)]
    assert loaded.layers[3].records[1].offset == 4096 + end + 4096


def test_unknown_planes_are_refused_otherwise(tmp_path):
    """An unknown plane that is not optional is refused by name."""
    new = content()
    new["planes"].append(
        {"name": "warp", "requires": ["base"], "optional": False, "offset": SIZE, "length": 4096}
    )
    with pytest.raises(BadManifest, match="'warp', unknown to this edgemoe and not optional"):
        load(tmp_path, new)


def test_a_newer_format_is_refused(tmp_path):
    """A newer format is refused with both versions in the message."""
    with pytest.raises(BadManifest, match="format 4, above 3"):
        load(tmp_path, content() | {"format": 4})


def test_a_head_of_six_bits_makes_a_store_that_older_programs_refuse(tmp_path):
    """Its store has format 3 and another fingerprint; a store with a head of 8 bits has no field of it."""
    made = replace(MANIFEST, head_bits=6)
    made.save(tmp_path / MANIFEST_NAME)
    assert Manifest.load(tmp_path) == made
    assert (made.format, json.loads(made.to_json())["head_bits"]) == (3, 6)
    assert made.fingerprint != MANIFEST.fingerprint
    assert "head_bits" not in content()


def test_unknown_fields_are_ignored(tmp_path):
    """Unknown fields are ignored."""
    assert load(tmp_path, content() | {"later": 1}) == MANIFEST


def put(*path: Any) -> Callable[[Content], None]:
    """Returns a change that sets the last item of `path` at the place of the items before it."""
    *keys, last, value = path

    def change(content: Any) -> None:
        for key in keys:
            content = content[key]
        content[last] = value

    return change


def drop(*path: Any) -> Callable[[Content], None]:
    *keys, last = path

    def change(content: Any) -> None:
        for key in keys:
            content = content[key]
        del content[last]

    return change


ROW = ("layers", "3", "records", 0)
FAULTS = {
    "format a text": put("format", "1"),
    "format true": put("format", True),
    "no source": drop("source"),
    "an unknown layout": put("layout", "cpu-avx3"),
    "another layout's probe": put("probe", PROBES["cuda"]),
    "no such level": put("max_level", 6),
    "a level with other planes": put("max_level", 4),
    "dense bits between": put("dense_bits", 12),
    "a head of five bits": put("head_bits", 5),
    "a head of six bits next to 16": lambda c: c.update(dense_bits=16, head_bits=6),
    "no matrices": put("matrices", []),
    "two matrices of one name": put("matrices", 1, "name", "gate_up"),
    "an odd group": put("matrices", 0, "group", 48),
    "rows not padded": put("matrices", 0, "padded_rows", 40),
    "columns padded too far": put("matrices", 0, "padded_cols", 192),
    "huge rows": put("matrices", 0, "rows", 2**60),
    "no rows": put("matrices", 0, "rows", 0),
    "rows that change the record": put("matrices", 1, "padded_rows", 1 << 20),
    "no planes": put("planes", []),
    "planes out of order": lambda c: c["planes"].reverse(),
    "a plane at another offset": put("planes", 1, "offset", 4096),
    "a plane of another length": put("planes", 2, "length", 4096),
    "a plane that requires other planes": put("planes", 2, "requires", ["base"]),
    "a plane that does not say if optional": drop("planes", 0, "optional"),
    "a layer that is no number": put("layers", "x", {}),
    "a layer with a leading zero": put("layers", "07", {}),
    "a layer past all bounds": put("layers", "999999", {}),
    "a layer without experts": put("layers", "3", "records", []),
    "an offset inside a block": put(*ROW, 0, 4097),
    "a negative offset": put(*ROW, 0, -4096),
    "an offset past all bounds": put(*ROW, 0, 2**62),
    "an offset that is true": put(*ROW, 0, True),
    "records that overlap": put("layers", "3", "records", 1, 0, 4096 + SIZE - 4096),
    "an empty record": put("layers", "3", "records", 0, []),
    "a checksum too few": drop(*ROW, 3),
    "a short checksum": put(*ROW, 1, "abc"),
    "a checksum with capitals": put(*ROW, 1, "ABCDEF0123456789"),
    "a file outside": put("layers", "3", "file", "../x"),
    "an absolute file": put("layers", "3", "file", "/x"),
    "a file on Windows' other drive": put("layers", "3", "file", "D:\\x"),
    "the directory itself": put("layers", "3", "file", ".."),
    "a file with a NUL": put("layers", "3", "file", "x\0"),
    "a nameless file": put("layers", "3", "file", ""),
    "two layers in one file": put("layers", "3", "file", OTHER.file),
    "another file that is a layer's": put("files", OTHER.file, [1, "0" * 16]),
    "another file outside": put("files", "a/b", [1, "0" * 16]),
    "codes of a level that does not exist": put("codes", "importance", {"3": 1}),
    "codes without weights": put("codes", "importance", {}),
    "codes whose run is a path": put("codes", "run", "../../ab"),
    "codes without tokens": put("codes", "tokens", 0),
    "codes that are a list": put("codes", []),
    "a KL that is no number": put("dense_choice", "experts", "0.1"),
    "an endless KL": put("dense_choice", "added", {"4": 1e999}),
    "a KL of bits that are no number": put("dense_choice", "added", {"four": 0.1}),
    "a choice without tokens": put("dense_choice", "tokens", 0),
    "a file of negative size": put("files", "config.json", 0, -1),
    "a file without a size": put("files", "config.json", ["0" * 16]),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_an_invalid_manifest_is_refused(tmp_path, fault):
    """Every fault raises BadManifest with the file's name."""
    changed = content()
    fault(changed)
    with pytest.raises(BadManifest, match=MANIFEST_NAME.replace(".", r"\.")):
        load(tmp_path, changed)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"format":1,"format":1}',
        MANIFEST.to_json()[:-9],
        b"[" * 9999,
        b"9" * 5000,
    ],
    ids=range(8),
)
def test_bytes_of_another_kind_are_refused(tmp_path, raw):
    """Torn, empty or foreign bytes raise BadManifest."""
    (tmp_path / MANIFEST_NAME).write_bytes(raw)
    with pytest.raises(BadManifest):
        Manifest.load(tmp_path)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yields the path of every value in nested JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in [(*at, key), *paths(inner, (*at, key))]]


junk = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.builds(list)
    | st.builds(dict)
)


@pytest.mark.e2e
@settings(max_examples=48, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(paths(content())), junk | st.lists(junk, max_size=4)),
        min_size=1,
        max_size=3,
    )
)
def test_any_value_at_any_place_raises_no_other_error(tmp_path, changes):
    """With any value at any place, the manifest is loaded or refused with BadManifest."""
    changed = copy.deepcopy(content())
    for place, value in changes:
        try:
            put(*place, value)(changed)
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took this place away
    try:
        loaded = load(tmp_path, changed)
    except BadManifest:
        return
    assert Manifest.read(tmp_path / MANIFEST_NAME) == loaded
    for layer in loaded.layers.values():
        spans = sorted(ByteRange(r.offset, loaded.geometry.record_bytes) for r in layer.records)
        assert all(a.end <= b.offset for a, b in pairwise(spans))


def test_a_directory_without_manifest_is_no_store(tmp_path):
    """An unfinished conversion and a directory without a store raise UserError with different messages."""
    with pytest.raises(UserError, match="convert the model first"):
        Manifest.load(tmp_path)
    MANIFEST.save(tmp_path / MARKER_NAME)
    with pytest.raises(UserError, match="unfinished"):
        Manifest.load(tmp_path)
