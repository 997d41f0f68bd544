"""storage/store/verify.py: exactly the damaged parts are reported, and descriptions equal the files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from small_store import EXPERTS, LAYERS, convert, flip, geometry, writer

from edgemoe.errors import (
    BadHeader,
    BadManifest,
    ChecksumMismatch,
    MissingTensor,
    StoreBusy,
    TruncatedFile,
    UserError,
)
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from edgemoe.storage.store.contents import describe
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest
from edgemoe.storage.store.verify import verify

SIZE = geometry().record_bytes


@pytest.fixture
def store(tmp_path) -> Path:
    (tmp_path / "config.json").write_text('{"a": 1}')
    convert(tmp_path / "store", tmp_path / "config.json")
    return tmp_path / "store"


def damage(store: Path) -> list[str]:
    return [f"{type(error).__name__}: {error}" for error in verify(store, lambda done, total: None).damage]


def record_at(store: Path, layer: int, expert: int) -> tuple[Path, int]:
    records = Manifest.load(store).layers[layer]
    return store / records.file, records.records[expert].offset


def test_a_good_store_has_no_damage_and_is_read_whole(store):
    """Every record and every other file is read once; progress ascends to the total, and no file changes."""
    calls: list[tuple[int, int]] = []
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    report = verify(store, lambda done, total: calls.append((done, total)))
    others = (store / "dense.safetensors").stat().st_size + (store / "config.json").stat().st_size
    expected = len(LAYERS) * EXPERTS * SIZE + others
    assert report.damage == ()
    assert report.bytes_read == expected
    assert calls == sorted(calls)
    assert calls[-1] == (expected, expected)
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before


def test_all_damage_is_found_in_one_run(store):
    """Damage in two planes of one record, one plane of another layer and two files gives five errors in order."""
    path, offset = record_at(store, 1, 2)
    flip(path, offset + 1)
    flip(path, offset + 12288)
    path, offset = record_at(store, 4, 0)
    flip(path, offset + 8192)
    flip(store / "config.json", 0)
    os.truncate(store / "dense.safetensors", 4100)
    found = damage(store)
    expected = [
        ("ChecksumMismatch", "plane base of layer 1, expert 2"),
        ("ChecksumMismatch", "plane d8 of layer 1, expert 2"),
        ("ChecksumMismatch", "plane d4 of layer 4, expert 0"),
        ("ChecksumMismatch", "config.json"),
        ("TruncatedFile", "dense.safetensors"),
    ]
    assert len(found) == len(expected)
    for text, (kind, part) in zip(found, expected, strict=True):
        assert text.startswith(kind)
        assert part in text


@pytest.mark.parametrize("size", [0, 100, 5000, 4096 + SIZE])
def test_a_truncated_layer_is_one_error_and_the_others_are_read(store, size):
    """A truncated file is reported once, and the rest of the store is checked."""
    path, _ = record_at(store, 1, 0)
    os.truncate(path, size)
    flip(*record_at(store, 4, 2))
    first, second = verify(store, lambda done, total: None).damage
    assert isinstance(first, TruncatedFile | BadHeader)
    assert str(path) in str(first)
    assert isinstance(second, ChecksumMismatch)


def test_missing_files_are_named(store):
    """A missing layer file and another missing file give two errors."""
    record_at(store, 4, 0)[0].unlink()
    (store / "config.json").unlink()
    found = verify(store, lambda done, total: None).damage
    assert [type(error) for error in found] == [MissingTensor, MissingTensor]


def test_progress_reaches_the_end_despite_damage(store):
    """Unreadable parts count as done."""
    record_at(store, 4, 0)[0].unlink()
    calls: list[tuple[int, int]] = []
    verify(store, lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1]


def test_a_header_that_names_other_tensors_is_damage(store):
    """A header with other tensor names is damage, although the records are intact."""
    path, _ = record_at(store, 1, 0)
    path.write_bytes(path.read_bytes().replace(b"experts.1.0", b"experts.2.0"))
    (error,) = verify(store, lambda done, total: None).damage
    assert isinstance(error, BadHeader)
    assert str(path) in str(error)


def test_a_header_that_is_gone_is_damage_of_the_header_alone(store):
    """After a damaged header the records are found through the manifest and are intact."""
    path, _ = record_at(store, 1, 0)
    with path.open("r+b") as file:
        file.write(b"\xff" * 8)
    (error,) = verify(store, lambda done, total: None).damage
    assert isinstance(error, BadHeader)


def test_a_store_without_a_manifest_is_not_verified(store):
    """A broken store.json raises BadManifest, a missing one UserError."""
    (store / MANIFEST_NAME).write_text("{")
    with pytest.raises(BadManifest):
        verify(store, lambda done, total: None)
    (store / MANIFEST_NAME).unlink()
    with pytest.raises(UserError):
        verify(store, lambda done, total: None)


def test_a_store_being_written_is_not_verified(store):
    """A store that a converter writes raises StoreBusy."""
    with writer(store), pytest.raises(StoreBusy):
        verify(store, lambda done, total: None)


def test_describe_agrees_with_the_files(store):
    """Counts and sizes are the files', and the description is JSON."""
    found = json.loads(json.dumps(describe(store)))
    assert (found["layers"], found["experts"], found["experts_per_layer"]) == (2, 6, [3])
    assert (found["format"], found["layout"], found["source"], found["dense_bits"]) == (
        1,
        "cpu-avx2",
        "f00d",
        16,
    )
    shards = sum(path.stat().st_size for path in store.glob("experts-*"))
    assert sum(found["plane_bytes"].values()) == found["expert_bytes"] == shards - 2 * 4096
    assert found["dense_bytes"] == (store / "dense.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("max_level", "expected"), [(8, {"8": 8.5, "4": 4.5, "2": 2.5}), (4, {"4": 4.5, "2": 2.5})]
)
def test_bits_per_weight_on_disk(tmp_path, max_level, expected):
    """Experts of a real model's shape take the documented bits per weight, with padding."""
    matrices = (MatrixSpec.of("gate_up", 1536, 2048), MatrixSpec.of("down", 2048, 768))
    with writer(tmp_path, geometry=RecordGeometry(matrices, max_level)) as out:
        out.finish()
    assert describe(tmp_path)["bits_per_weight"] == expected
    assert describe(tmp_path)["weights_per_expert"] == 3 * 2048 * 768
