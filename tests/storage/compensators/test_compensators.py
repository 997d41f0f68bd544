"""Compensators, their reader and their index: an error type for every fault, and no hostile index."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import xxhash
from faults import FaultyPreadv, Pauses, error, short
from hypothesis import given
from hypothesis import strategies as st
from small_compensation import add
from small_conversion import run as convert_small
from small_store import buffer, flip

from edgemoe.errors import BadManifest, ChecksumMismatch, MissingTensor, ReadFailed, StoreBusy, TruncatedFile
from edgemoe.storage.base import BLOCK, ExpertKey, Plane
from edgemoe.storage.compensators.index import FOLDER, CompensatorIndex
from edgemoe.storage.compensators.reader import CompensatorReader
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.files.retry import PATIENCE
from edgemoe.storage.store.contents import describe
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest
from edgemoe.storage.store.verify import verify

KEY = ExpertKey(1, 2)


@pytest.fixture(scope="module")
def whole(small_source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with compensators, whose second layer has one of rank 0. Read-only."""
    directory = tmp_path_factory.mktemp("whole")
    convert_small(small_source, directory)
    add(small_source, directory, rule="kurtosis", mean_rank=6)
    return directory


@pytest.fixture(scope="module")
def compensated_store(small_source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with compensators of 4 ranks on average. Read-only."""
    directory = tmp_path_factory.mktemp("made")
    convert_small(small_source, directory)
    add(small_source, directory)
    return directory


@pytest.fixture
def store(compensated_store, tmp_path) -> Path:
    return shutil.copytree(compensated_store, tmp_path / "store")


def index_of(store: Path) -> CompensatorIndex:
    index = Manifest.load(store).compensators
    assert index
    return index


def place(store: Path, key: ExpertKey = KEY) -> tuple[Path, int, int]:
    """File, offset and length of a compensator."""
    index = index_of(store)
    entry = index.entry(key)
    return store / FOLDER / index.layers[key.layer].file, entry.offset, entry.length


def test_every_compensator_is_the_bytes_of_its_file(whole):
    """Whole blocks, at the places and with the checksums of store.json; ranks of 0 take no byte."""
    index = index_of(whole)
    with CompensatorReader(whole, index) as reader:
        for layer, found in index.layers.items():
            raw = (whole / FOLDER / found.file).read_bytes()
            for expert, entry in enumerate(found.entries):
                there = raw[entry.offset : entry.offset + entry.length]
                assert reader.load(ExpertKey(layer, expert)).tobytes() == there
                assert xxhash.xxh3_64_intdigest(there) == entry.checksum
                assert entry.offset % BLOCK == entry.length % BLOCK == 0
                assert (entry.length == 0) == (entry.ranks == (0, 0, 0))
    lengths = [entry.length for layer in index.layers.values() for entry in layer.entries]
    assert reader.bytes_read == sum(lengths) == index.nbytes
    assert 0 in lengths


def test_many_threads_read_at_once(whole):
    """Eight threads get the same bytes as one."""
    index = index_of(whole)
    with CompensatorReader(whole, index) as reader, ThreadPoolExecutor(8) as pool:
        keys = [ExpertKey(layer, e) for layer in index.layers for e in range(3)]
        alone = [reader.load(key).tobytes() for key in keys]
        assert [raw.tobytes() for raw in pool.map(reader.load, keys * 20)] == alone * 20


def test_a_changed_bit_is_named(store):
    """Layer, expert, file and offset, and what to do."""
    path, offset, length = place(store)
    for at in (0, length - 1):
        flip(path, offset + at)
        with CompensatorReader(store, index_of(store)) as reader:
            with pytest.raises(ChecksumMismatch) as caught:
                reader.load(KEY)
            reader.load(ExpertKey(1, 1))
        flip(path, offset + at)
        text = str(caught.value)
        assert "the compensator of layer 1, expert 2" in text
        assert f"from {path} at offset {offset}" in text
        assert "edgemoe compensate" in text


def test_a_short_file_and_a_missing_one_are_named_when_they_are_opened(store):
    path, offset, _ = place(store)
    os.truncate(path, offset + 1)
    with pytest.raises(TruncatedFile, match=f"the compensators of layer 1 in {path}.*edgemoe compensate"):
        CompensatorReader(store, index_of(store))
    path.unlink()
    with pytest.raises(MissingTensor, match=f"{path.name}.*edgemoe compensate"):
        CompensatorReader(store, index_of(store))


def test_reads_survive_what_a_disk_does(store, monkeypatch):
    """Transient errors, short reads and a refused O_DIRECT give the same bytes; a disk that stays broken, an error."""
    with CompensatorReader(store, index_of(store)) as reader:
        expected = reader.load(KEY).tobytes()
        pauses, disk = Pauses(), FaultyPreadv()
        pauses.install(monkeypatch)
        monkeypatch.setattr(os, "preadv", disk)
        for fault in (error(errno.EIO), error(errno.EINVAL), short(BLOCK // 2)):
            disk.faults.append(fault)
            assert reader.load(KEY).tobytes() == expected
        assert reader._files.retries == 2
        disk.rest = pauses.until(pauses.now + 2 * PATIENCE, errno.EIO)
        with pytest.raises(ReadFailed, match="layer 1, expert 2"):
            reader.load(KEY)


def test_a_buffer_of_another_length_is_refused(store):
    length = place(store)[2]
    with (
        CompensatorReader(store, index_of(store)) as reader,
        pytest.raises(ValueError, match=f"of {length} bytes"),
    ):
        reader.read(KEY, Plane.BASE, Plane.BASE, [buffer(length + BLOCK)])


def test_a_reader_excludes_writers_until_it_is_closed(store):
    with CompensatorReader(store, index_of(store)), pytest.raises(StoreBusy):
        StoreLock(store, exclusive=True)
    StoreLock(store, exclusive=True).close()


def test_verify_names_each_damaged_factor(store):
    """A changed bit, header or length of a file is one error with its name, and the rest is read."""
    calls: list[tuple[int, int]] = []
    report = verify(store, lambda done, total: calls.append((done, total)))
    assert report.damage == ()
    assert report.bytes_read == calls[-1][0] == calls[-1][1]
    path, offset, length = place(store)
    flip(path, offset + 100)
    flip(*place(store, ExpertKey(0, 1))[:2])
    first, second = verify(store, lambda done, total: None).damage
    assert "the compensator of layer 0, expert 1" in str(first)
    assert "the compensator of layer 1, expert 2" in str(second)
    flip(path, offset + 100)
    flip(*place(store, ExpertKey(0, 1))[:2])
    path.write_bytes(path.read_bytes().replace(b"compensators.1.0", b"compensators.2.0"))
    (damage,) = verify(store, lambda done, total: None).damage
    assert f"3 records in {path}" in str(damage)
    os.truncate(path, offset + length - 1)
    (damage,) = verify(store, lambda done, total: calls.append((done, total))).damage
    assert isinstance(damage, TruncatedFile)
    assert calls[-1][0] == calls[-1][1]


def test_describe_has_the_options_and_sizes(store):
    """Bits per weight count whole blocks, over all weights of the experts."""
    index = index_of(store)
    sizes = [entry.length for layer in index.layers.values() for entry in layer.entries]
    found = json.loads(json.dumps(describe(store)))["compensators"]
    assert found == {
        "base_level": 2,
        "rule": "error",
        "mean_rank": 4,
        "reference": Manifest.load(store).source,
        "left_error": index.error,
        "bits_per_weight": sum(sizes) / len(sizes) * 8 / (3 * 64 * 32),
        "bytes": sum(sizes),
    }


def content(store: Path) -> dict[str, Any]:
    return json.loads((store / MANIFEST_NAME).read_bytes())


Change = Callable[[dict[str, Any]], object]

INVALID: dict[str, tuple[Change, str]] = {
    "no object": (lambda c: c.update(compensators=[1]), "compensators"),
    "format": (lambda c: c["compensators"].update(format="1"), "format"),
    "level": (lambda c: c["compensators"].update(base_level=3), "level 3"),
    "rule": (lambda c: c["compensators"].update(rule="best"), "rule 'best'"),
    "rank": (lambda c: c["compensators"].update(mean_rank=0), "mean_rank 0"),
    "error": (lambda c: c["compensators"].update(error=-1), "error -1"),
    "reference": (lambda c: c["compensators"].update(reference=7), "reference 7"),
    "layers": (lambda c: c["compensators"]["layers"].pop("1"), "other layers"),
    "experts": (
        lambda c: c["compensators"]["layers"]["1"]["records"].pop(),
        "2 compensators for the 3 experts",
    ),
    "file": (lambda c: c["compensators"]["layers"]["1"].update(file="../x"), "as a file name"),
    "row": (lambda c: c["compensators"]["layers"]["1"]["records"].__setitem__(0, [1]), "not offset, length"),
    "offset": (lambda c: c["compensators"]["layers"]["1"]["records"][0].__setitem__(0, 5), "offset 5"),
    "length": (lambda c: c["compensators"]["layers"]["1"]["records"][0].__setitem__(1, 8192), "length 8192"),
    "ranks": (lambda c: c["compensators"]["layers"]["1"]["records"][0].__setitem__(2, 33), "not 0 to 32"),
    "negative": (lambda c: c["compensators"]["layers"]["1"]["records"][0].__setitem__(3, -1), "not 0 to 32"),
    "true": (lambda c: c["compensators"]["layers"]["1"]["records"][0].__setitem__(4, True), "not 0 to 32"),
    "checksum": (lambda c: c["compensators"]["layers"]["1"]["records"][0].__setitem__(5, "xyz"), "checksum"),
    "overlap": (lambda c: c["compensators"]["layers"]["1"]["records"][1].__setitem__(0, 4096), "overlapping"),
}


@pytest.mark.e2e
@pytest.mark.parametrize(("change", "words"), INVALID.values(), ids=INVALID)
def test_an_index_that_contradicts_itself_or_the_store_is_refused(store, change, words):
    """With the wrong value."""
    changed = content(store)
    change(changed)
    (store / MANIFEST_NAME).write_text(json.dumps(changed))
    with pytest.raises(BadManifest, match=words):
        Manifest.load(store)


def paths(value: object, at: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The path of every value inside nested lists and objects."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, each in items for path in paths(each, (*at, key)))]


@pytest.mark.e2e
@given(st.data())
def test_any_value_in_the_index_raises_no_other_error(whole, data):
    """Whatever stands where: a manifest whose numbers are in bounds, or BadManifest."""
    changed = copy.deepcopy(content(whole))
    value = changed["compensators"]
    *parents, last = data.draw(st.sampled_from(paths(value)[1:]))
    for key in parents:
        value = value[key]
    value[last] = data.draw(
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats()
        | st.text(max_size=3)
        | st.lists(st.integers(), max_size=7)
    )
    try:
        found = Manifest.parse(json.dumps(changed).encode(), whole)
    except BadManifest:
        return
    if found.compensators:
        for layer in found.compensators.layers.values():
            assert all(entry.offset >= 0 and max(entry.ranks) <= 32 for entry in layer.entries)
