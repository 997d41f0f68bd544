"""storage/store/writer.py and atomic.py: the written files, and the files after a kill or on a full disk."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from programs import run_forked
from safetensors.torch import load_file
from small_store import DENSE, EXPERTS, LAYERS, FailureError, convert, dense_tensors, geometry, record, writer

from edgemoe.errors import DoesNotFit, StoreBusy, UserError, WriteFailed
from edgemoe.storage.files import atomic
from edgemoe.storage.files.atomic import PARTIAL, replacing
from edgemoe.storage.files.header import read_header
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.sizes import format_size
from edgemoe.storage.store.manifest import DENSE_NAME, MANIFEST_NAME, MARKER_NAME, Manifest

SIZE = geometry().record_bytes


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "test"}')
    return path


@pytest.fixture
def store(tmp_path) -> Path:
    return tmp_path / "store"


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_files_and_records_have_the_places_of_the_manifest(store, config):
    """Records, planes' checksums, dense weights and copies equal the inputs."""
    manifest = convert(store, config)
    assert Manifest.load(store) == manifest
    assert set(files(store)) == {
        "experts-00001.safetensors",
        "experts-00004.safetensors",
        DENSE_NAME,
        "config.json",
        MANIFEST_NAME,
    }
    for layer in LAYERS:
        raw = (store / manifest.layers[layer].file).read_bytes()
        for expert, entry in enumerate(manifest.layers[layer].records):
            expected = record(layer, expert, SIZE).tobytes()
            assert raw[entry.offset : entry.offset + SIZE] == expected
            base, d4, d8 = expected[:8192], expected[8192:12288], expected[12288:]
            assert entry.checksums == tuple(map(xxhash.xxh3_64_intdigest, (base, d4, d8)))
    for name, entry in manifest.files.items():
        raw = (store / name).read_bytes()
        assert (entry.size, entry.checksum) == (len(raw), xxhash.xxh3_64_intdigest(raw))
    assert (store / "config.json").read_bytes() == config.read_bytes()


def test_the_safetensors_library_reads_every_file(store, config):
    """The safetensors library reads every tensor with its name, shape, type and value."""
    convert(store, config)
    loaded = load_file(store / "experts-00004.safetensors")
    assert set(loaded) == {f"experts.4.{expert}" for expert in range(EXPERTS)}
    assert np.array_equal(loaded["experts.4.2"].numpy(), record(4, 2, SIZE))
    dense = load_file(store / DENSE_NAME)
    for name, tensor in dense_tensors():
        assert dense[name].dtype == tensor.dtype
        assert torch.equal(dense[name], tensor)


def test_records_start_on_blocks(store, config):
    """Every record's file offset is a multiple of 4 KiB, as O_DIRECT requires."""
    convert(store, config)
    entries = read_header(store / "experts-00001.safetensors").tensors
    assert [entry.range.offset % 4096 for entry in entries.values()] == [0] * EXPERTS


@pytest.mark.parametrize("max_level", [8, 4])
@pytest.mark.parametrize("stop_at", [(layer, expert) for layer in LAYERS for expert in range(EXPERTS)])
def test_a_resumed_conversion_gives_the_same_bytes(tmp_path, store, config, stop_at, max_level):
    """A conversion that fails anywhere leaves no partial file, and the next run completes the same bytes."""
    convert(tmp_path / "straight", config, max_level=max_level)
    with pytest.raises(FailureError):
        convert(store, config, stop_at=stop_at, max_level=max_level)
    assert set(files(store)) == {MARKER_NAME} | {
        f"experts-0000{n}.safetensors" for n in LAYERS if n < stop_at[0]
    }
    with writer(store, max_level) as resumed:
        assert resumed.finished_layers() == {layer for layer in LAYERS if layer < stop_at[0]}
    with pytest.raises(UserError, match="unfinished"):
        Manifest.load(store)
    convert(store, config, max_level=max_level)
    assert files(store) == files(tmp_path / "straight")


KILLED = """
import os, signal, sys, pathlib
sys.path[:0] = sys.argv[1:3]
from small_store import convert
directory, config = map(pathlib.Path, sys.argv[3:])

def in_child(kill_at, directory):
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = 0
    def counted(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call
    for name in ("write", "fsync", "replace", "unlink", "mkdir"):
        setattr(os, name, counted(getattr(os, name)))
    convert(directory, config)
    os._exit(calls)

calls = in_child(None, directory / "0")
for kill_at in range(1, calls + 1):
    assert in_child(kill_at, directory / str(kill_at)) == -signal.SIGKILL
print(calls)
"""


@pytest.mark.e2e
def test_sigkill_before_any_system_call_is_recovered_from(tmp_path, config):
    """A conversion that is killed before any write, fsync or rename resumes to the same bytes."""
    convert(tmp_path / "straight", config)
    expected = files(tmp_path / "straight")
    roots = [str(Path(atomic.__file__).parent.parent), str(Path(__file__).parents[2] / "support" / "files")]
    done = run_forked("-c", KILLED, *roots, tmp_path, config)
    assert done.returncode == 0, done.stderr
    calls = int(done.stdout)
    assert files(tmp_path / "0") == expected
    assert calls > 25
    for kill_at in range(1, calls + 1):
        convert(tmp_path / str(kill_at), config)
        assert files(tmp_path / str(kill_at)) == expected


def test_a_changed_layer_file_is_written_again(tmp_path, store, config):
    """An incomplete or foreign file with a layer's name is not a finished layer."""
    convert(tmp_path / "straight", config)
    with pytest.raises(FailureError):
        convert(store, config, stop_at=(4, 1))
    shard = store / "experts-00001.safetensors"
    good = shard.read_bytes()
    for bad in (
        good[:-1],
        good.replace(b"experts.1.0", b"experts.2.0"),
        b"",
        good.replace(b"xxh3_64", b"xxh3_65"),
    ):
        shard.write_bytes(bad)
        with writer(store) as resumed:
            assert resumed.finished_layers() == set()
    convert(store, config)
    assert files(store) == files(tmp_path / "straight")


@pytest.mark.parametrize(
    "change",
    [{"source": "beef"}, {"layout": LAYOUTS["cuda"]}, {"dense_bits": 8}, {"geometry": geometry(4)}],
    ids=["source", "layout", "dense_bits", "max_level"],
)
@pytest.mark.parametrize("finished", [True, False])
def test_another_conversion_is_refused_and_left_alone(store, config, change, finished):
    """A store of another source or other options keeps every byte, and the message names the difference."""
    if finished:
        convert(store, config)
    else:
        with pytest.raises(FailureError):
            convert(store, config, stop_at=(4, 0))
    before = files(store)
    name = "max_level" if "geometry" in change else next(iter(change))
    with pytest.raises(UserError, match=name), writer(store, **change):
        pass
    assert files(store) == before
    StoreLock(store, exclusive=True).close()


def test_a_directory_of_something_else_is_refused(store):
    """A directory with other files is refused and not changed."""
    store.mkdir()
    (store / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.txt"), writer(store):
        pass
    assert set(files(store)) == {"thesis.txt"}


def test_an_incomplete_marker_is_ignored(store):
    """A directory with only an incomplete marker counts as empty."""
    store.mkdir()
    (store / (MARKER_NAME + PARTIAL)).write_text("{")
    with writer(store):
        pass
    assert set(files(store)) == {MARKER_NAME}


def test_a_finished_store_can_be_finished_again(store, config):
    """A second identical conversion changes no byte."""
    convert(store, config)
    before = files(store)
    convert(store, config)
    assert files(store) == before


def test_two_converters_conflict(store):
    """The second converter raises StoreBusy."""
    with writer(store), pytest.raises(StoreBusy), writer(store):
        pass
    with writer(store):
        pass


@pytest.mark.parametrize("records", [0, 2, 4])
def test_a_wrong_number_of_records_writes_nothing(store, records):
    """Too few or too many records raise ValueError and leave no file."""
    with writer(store) as out, pytest.raises(ValueError, match=r"shorter|longer"):
        out.write_layer(0, 3, (record(0, e, SIZE) for e in range(records)))
    assert set(files(store)) == {MARKER_NAME}


def test_a_record_of_another_length_writes_nothing(store):
    """A record of another length raises ValueError and leaves no file."""
    with writer(store) as out, pytest.raises(ValueError, match=str(SIZE)):
        out.write_layer(0, 1, [record(0, 0, SIZE - 1)])
    assert set(files(store)) == {MARKER_NAME}


@pytest.mark.parametrize("change", ["missing", "order", "shape", "extra"])
def test_dense_tensors_other_than_the_specs_write_nothing(store, change):
    """The tensors must match the specs in name, shape and order; otherwise no file is left."""
    tensors = list(dense_tensors())
    changed = {
        "missing": tensors[:-1],
        "order": tensors[::-1],
        "shape": [(name, tensor.reshape(-1)) for name, tensor in tensors],
        "extra": [*tensors, ("more", torch.zeros(1))],
    }[change]
    with writer(store) as out, pytest.raises(ValueError, match=r"expected the tensor|shorter|longer"):
        out.write_dense(DENSE, changed)
    assert set(files(store)) == {MARKER_NAME}


def test_a_disk_too_small_is_refused_before_writing(store, free_disk):
    """The error contains the bytes needed and free, and no file is written."""
    with writer(store) as out:
        free_disk(3 * SIZE)
        with pytest.raises(DoesNotFit, match=f"{format_size(3 * SIZE)} free") as caught:
            out.write_layer(0, 3, pytest.fail)
        with pytest.raises(DoesNotFit):
            out.require_free(3 * SIZE + 1)
        out.require_free(3 * SIZE)
    assert caught.value.minimum == 4096 + 3 * SIZE
    assert set(files(store)) == {MARKER_NAME}


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_disk_that_fills_up_leaves_no_partial_file(store, monkeypatch, after, config):
    """ENOSPC raises DoesNotFit, removes the incomplete file, and keeps earlier layers."""
    real, writes = os.write, 0
    with writer(store) as out:
        out.write_layer(0, 1, [record(0, 0, SIZE)])

        def full(fd: int, data: memoryview) -> int:
            nonlocal writes
            writes += 1
            if writes > after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data)

        monkeypatch.setattr(atomic.os, "write", full)
        with pytest.raises(DoesNotFit, match="filled up"):
            out.write_layer(1, 2, (record(1, e, SIZE) for e in range(2)))
        monkeypatch.undo()
        assert set(files(store)) == {MARKER_NAME, "experts-00000.safetensors"}
        assert out.finished_layers() == {0}


def test_short_writes_are_continued(store, config, tmp_path, monkeypatch):
    """Writes of a few bytes per call complete the same files."""
    convert(tmp_path / "straight", config)
    real = os.write
    monkeypatch.setattr(atomic.os, "write", lambda fd, data: real(fd, data[:1000]))
    convert(store, config)
    assert files(store) == files(tmp_path / "straight")


def test_replacing_keeps_the_old_file_until_the_new_one_is_complete(tmp_path):
    """The old file keeps its name during a write and after a failed one."""
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fail() -> None:
        with replacing(path, 3) as fd:
            os.write(fd, b"new")
            assert path.read_bytes() == b"old"
            raise FailureError

    with pytest.raises(FailureError):
        fail()
    assert files(tmp_path) == {"x": b"old"}
    with replacing(path, 3) as fd:
        os.write(fd, b"new")
    assert files(tmp_path) == {"x": b"new"}


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_the_old_file_exists_until_the_rename(tmp_path, monkeypatch, call):
    """A failure up to the rename leaves the old file complete under its name."""
    path = tmp_path / "x"
    path.write_bytes(b"old")

    def fail(*args: object) -> None:
        assert path.read_bytes() == b"old"
        raise FailureError

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(FailureError), replacing(path, 3):
        pass
    assert files(tmp_path) == {"x": b"old"}


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, WriteFailed), (errno.EFBIG, DoesNotFit)])
def test_a_refused_write_has_a_type_and_names_the_file(tmp_path, number, kind):
    """EIO raises WriteFailed and EFBIG DoesNotFit, with the path; no file is left."""
    with pytest.raises(kind, match=str(tmp_path / "x")), replacing(tmp_path / "x", 1):
        raise OSError(number, os.strerror(number))
    assert files(tmp_path) == {}


def test_the_marker_becomes_the_manifest(store, config):
    """The marker describes the conversion until the manifest replaces it."""
    with pytest.raises(FailureError):
        convert(store, config, stop_at=(1, 0))
    marker = json.loads((store / MARKER_NAME).read_text())
    assert (marker["source"], marker["layers"]) == ("f00d", {})
    convert(store, config)
    assert not (store / MARKER_NAME).exists()
