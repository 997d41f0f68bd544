"""Exports that end early, full disks and damage: the directory says that it is unfinished, and resumes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import small_checkpoint
from bpe_tokenizer import save_bpe
from faulty_disk import FaultyDisk, each_in_turn
from programs import ForkedPython
from resealed_store import reseal
from small_conversion import FAMILY, contents, run
from small_store import FailureError, flip

import edgemoe.storage.export.checkpoint
import edgemoe.storage.export.directory
import edgemoe.storage.export.gguf_plan
from edgemoe.commands import export as command
from edgemoe.errors import ChecksumMismatch, DamagedData, DoesNotFit, EdgemoeError, ModelRefused, UserError
from edgemoe.storage.export.directory import EXPORT_NAME, UNFINISHED_NAME, read_contents, verify_export
from edgemoe.storage.export.levels import one_level, read_levels
from edgemoe.storage.export.plan import Errors, Expert, shards
from edgemoe.storage.export.plans import FORMATS
from edgemoe.storage.export.run import export
from edgemoe.storage.files.atomic import PARTIAL
from edgemoe.storage.store.manifest import Manifest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """small_checkpoint's model with all that a GGUF file needs, converted. Read-only."""
    source = small_checkpoint.save(tmp_path_factory.mktemp("source") / "model")
    config = json.loads((source / "config.json").read_text())
    config |= {"norm_topk_prob": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
    (source / "config.json").write_text(json.dumps(config))
    save_bpe(source)
    run(source, directory := tmp_path_factory.mktemp("store") / "small")
    return directory


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """One file per layer, so that an export has several."""
    for module in (edgemoe.storage.export.checkpoint, edgemoe.storage.export.gguf_plan):
        monkeypatch.setattr(module, "shards", lambda units: shards(units, limit=1))


def run_export(
    store: Path, to: Path, format: str = "compressed-tensors", level: int = 4, threads: int = 1
) -> Errors:
    levels = one_level(Manifest.load(store), level)
    return export(
        store, to, FAMILY, format=format, levels=levels, progress=lambda done, total: None, threads=threads
    )


@pytest.fixture(scope="module")
def straight(store, tmp_path_factory):
    """Format -> every file of an uninterrupted export, where each file holds a layer."""
    out = {}
    for format in FORMATS:
        with pytest.MonkeyPatch.context() as patch:
            for module in (edgemoe.storage.export.checkpoint, edgemoe.storage.export.gguf_plan):
                patch.setattr(module, "shards", lambda units: shards(units, limit=1))
            run_export(store, to := tmp_path_factory.mktemp("straight") / format, format)
        out[format] = contents(to)
    return out


@pytest.mark.e2e
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("threads", [2, 7])
def test_the_number_of_threads_leaves_no_trace(store, straight, tmp_path, format, threads):
    """More threads than experts give the bytes of one thread."""
    run_export(store, tmp_path / "out", format, threads=threads)
    assert contents(tmp_path / "out") == straight[format]
    assert sum(name.startswith("model") and "index" not in name for name in straight[format]) == 3


@pytest.mark.e2e
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("at", [(0, 0), (0, 2), (1, 1)])
def test_a_stopped_export_says_so_and_resumes(store, straight, tmp_path, monkeypatch, format, at):
    """Stopped at any expert there is a marker, no config.json, and no list of contents; the next run ends the same."""
    read = Expert.read

    def stopping(self: Expert, level: int | None = None):
        if (self.layer, self.number) == at:
            raise FailureError
        return read(self, level)

    with monkeypatch.context() as patch:
        patch.setattr(Expert, "read", stopping)
        with pytest.raises(FailureError):
            run_export(store, tmp_path / "out", format)
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert UNFINISHED_NAME in left
    assert not left & {EXPORT_NAME, "config.json"}
    complete = [name for name in left if name.startswith("model")]
    before = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in complete}
    run_export(store, tmp_path / "out", format)
    assert contents(tmp_path / "out") == straight[format]
    assert len(complete) == at[0] + (format == "gguf")  # whose first file has the weights outside of layers
    assert before == {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in complete}


@pytest.mark.e2e
def test_a_killed_process_leaves_a_marker_and_resumes(store, straight, tmp_path):
    """SIGKILL in the second layer: nothing of it looks finished, and the next run ends with the same bytes."""
    out = tmp_path / "out"
    program = f"""
import sys, time
sys.path[:0] = [{str(ROOT / "tests/support/files")!r}, {str(ROOT / "tests/support")!r}]
from pathlib import Path
import edgemoe.storage.export.checkpoint as module
from edgemoe.storage.export.plan import Errors, Expert, shards
from edgemoe.storage.export.run import export
from edgemoe.storage.export.levels import one_level
from edgemoe.storage.store.manifest import Manifest
from small_conversion import FAMILY
module.shards = lambda units: shards(units, limit=1)
read = Expert.read
def slow(self, level=None):
    if (self.layer, self.number) == (1, 1):
        while not [*Path({str(out)!r}).glob("model-00002*.partial")]:  # work begins before its file
            time.sleep(0.01)
        print("here", flush=True)
        time.sleep(60)
    return read(self, level)
Expert.read = slow
store = Path({str(store)!r})
export(store, Path({str(out)!r}), FAMILY, format="compressed-tensors", levels=one_level(Manifest.load(store), 4),
       progress=lambda done, total: None, threads=1)
"""
    process = ForkedPython("-c", program, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"here\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = {path.name for path in out.iterdir()}
    assert UNFINISHED_NAME in left
    assert not left & {EXPORT_NAME, "config.json"}
    assert any(name.endswith(PARTIAL) for name in left)
    run_export(store, out)
    assert contents(out) == straight["compressed-tensors"]


@pytest.mark.e2e
@pytest.mark.parametrize("format", FORMATS)
def test_a_failure_of_any_call_damages_no_file(store, straight, fast, monkeypatch, format):
    """Whichever call of the operating system fails once, the export raises a typed error and resumes, or is right.

    Faults take turns over the calls of each kind: with all formats, the first one meets every fault.
    """
    faults, turn = (errno.EIO, errno.ENOSPC, None), [*FORMATS].index(format)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with monkeypatch.context() as patch:
        calls = FaultyDisk(patch, 0, None).calls
        run_export(store, fast / "count", format)
    assert len(calls) > 20
    for at in each_in_turn(calls, 9 * turn, 27):
        out, which = fast / "out", turn + calls[:at].count(calls[at - 1])
        with monkeypatch.context() as patch:
            FaultyDisk(patch, at, faults[which % 3])
            try:
                run_export(store, out, format)
            except (EdgemoeError, OSError) as error:
                assert isinstance(error, EdgemoeError), (at, error)
        if out.exists():
            assert not (out / EXPORT_NAME).exists() or contents(out) == straight[format], at
        run_export(store, out, format)
        assert contents(out) == straight[format], at
        shutil.rmtree(out)


def test_a_full_disk_names_the_bytes_and_keeps_what_is_complete(store, straight, tmp_path, free_disk):
    """Before the first write the free bytes are compared with all that is missing."""
    free_disk(5000)
    with pytest.raises(DoesNotFit) as caught:
        run_export(store, tmp_path / "out")
    free_disk(1 << 40)
    weights = sum(
        len(raw) for name, raw in straight["compressed-tensors"].items() if name.endswith("tensors")
    )
    assert caught.value.minimum == weights
    assert {path.name for path in (tmp_path / "out").iterdir()} == {UNFINISHED_NAME}
    run_export(store, tmp_path / "out")
    assert contents(tmp_path / "out") == straight["compressed-tensors"]


def test_a_finished_export_is_not_changed(store, straight, tmp_path):
    """A second run of the command returns at once, with the errors of the first run."""
    errors = run_export(store, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert errors.total > 0
    assert run_export(store, tmp_path / "out") == errors
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["*.safetensors", "config.json", "tokenizer.json"])
def test_a_finished_export_gets_a_lost_file_again(store, tmp_path, name):
    """A file that was removed from a finished export is written again by the same command."""
    run_export(store, out := tmp_path / "out")
    want = contents(out)
    next(out.glob(name)).unlink()
    run_export(store, out)
    assert contents(out) == want


def test_files_of_another_layout_are_not_mixed(store, tmp_path, monkeypatch):
    """An export of other file sizes, as of another version, is refused, and stays as it is."""
    run_export(store, out := tmp_path / "out")
    before = contents(out)
    monkeypatch.setattr(edgemoe.storage.export.checkpoint, "shards", shards)  # all layers in one file
    with pytest.raises(UserError, match="layout"):
        run_export(store, out)
    assert contents(out) == before


def test_what_a_kill_left_is_free_again(store, tmp_path, monkeypatch):
    """The bytes of a file that a kill cut short are not counted as taken when the next run looks for space."""
    run_export(store, out := tmp_path / "out")
    want = contents(out)
    (out / EXPORT_NAME).rename(out / UNFINISHED_NAME)
    lost = next(out.glob("*.safetensors"))
    lost.rename(left := lost.with_name(lost.name + PARTIAL))
    require, seen = edgemoe.storage.export.directory.require_free, []

    def watched(path, size):
        seen.append(left.exists())
        require(path, size)

    monkeypatch.setattr(edgemoe.storage.export.directory, "require_free", watched)
    run_export(store, out)
    assert seen == [False]
    assert contents(out) == want


def test_the_commands_formats_are_those_there_are():
    """The command lists them without loading torch."""
    assert sorted(command.FORMATS) == sorted(FORMATS)


@pytest.mark.parametrize(("format", "level"), [("safetensors", 4), ("compressed-tensors", 8)])
def test_another_export_is_refused(store, straight, tmp_path, format, level):
    """A directory belongs to one store, format and level; the message names the difference."""
    run_export(store, tmp_path / "out")
    with pytest.raises(UserError, match=r"format|levels"):
        run_export(store, tmp_path / "out", format, level)
    assert contents(tmp_path / "out") == straight["compressed-tensors"]


def test_other_files_are_not_touched(store, tmp_path):
    """A directory with other files is refused; so are a file and the store itself."""
    (tmp_path / "notes.txt").write_text("mine")
    for destination, found in ((tmp_path, "notes"), (tmp_path / "notes.txt", "exists"), (store, "the store")):
        with pytest.raises(UserError, match=found):
            run_export(store, destination)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert not (store / UNFINISHED_NAME).exists()


@pytest.mark.e2e
@pytest.mark.parametrize("format", FORMATS)
def test_verify_names_the_damaged_file(store, tmp_path, format):
    """One changed bit in any file is found, with its offset's region; a shorter file is found too."""
    run_export(store, out := tmp_path / "out", format)
    size = sum(path.stat().st_size for path in out.iterdir() if path.name != EXPORT_NAME)
    assert verify_export(out, lambda done, total: None) == (size, [])
    for name in read_contents(out / EXPORT_NAME)["files"]:
        flip(out / name, 1)
        _, damage = verify_export(out, lambda done, total: None)
        assert [type(each) for each in damage] == [ChecksumMismatch]
        assert name in str(damage[0])
        flip(out / name, 1)
    os.truncate(out / name, 3)
    assert name in str(verify_export(out, lambda done, total: None)[1][0])


@pytest.mark.e2e
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "name", ["experts-00001.safetensors", "dense.safetensors", "tokenizer.json", "config.json"]
)
def test_damage_of_the_store_is_not_exported(store, tmp_path, format, name):
    """Every byte that is exported was compared with the store's checksums, whether a format copies or translates it."""
    shutil.copytree(store, damaged := tmp_path / "store")
    flip(damaged / name, (damaged / name).stat().st_size - 5)
    with pytest.raises(DamagedData, match=name):
        run_export(damaged, tmp_path / "out", format, level=8)
    assert not (tmp_path / "out" / EXPORT_NAME).exists()


def test_a_map_gives_the_longest_key(store, tmp_path):
    """An expert's own level goes before its layer's, and that before the level of all."""
    path = tmp_path / "map.json"
    path.write_text('{"*": 4, "1": 8, "1.2": 2, "0.0": 0}')
    assert read_levels(path, Manifest.load(store)) == {0: (0, 4, 4), 1: (8, 8, 2)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"0": 4}', "layer 1"),
        ('{"*": 3}', "3"),
        ('{"*": true}', "true|True"),
        ('{"*": 4, "7": 4}', "7"),
        ('{"*": 4, "0.3": 4}', r"0\.3"),
        ('{"all": 4}', "all"),
        ("[4]", "4"),
        ("{", "map of levels"),
    ],
)
def test_a_wrong_map_is_refused(store, tmp_path, text, words):
    """A map with a layer, an expert or a level that does not exist, or with a gap, names it."""
    (path := tmp_path / "map.json").write_text(text)
    with pytest.raises(UserError, match=words):
        read_levels(path, Manifest.load(store))


@pytest.mark.parametrize("format", ["compressed-tensors", "gguf"])
def test_levels_that_a_format_cannot_mix_are_refused_by_layer(store, tmp_path, format):
    """Experts of one layer share a tensor type; level 2 has none. Nothing is written."""
    for levels, found in (
        ({0: (4, 8, 4), 1: (4,) * 3}, "layer 0"),
        ({0: (2,) * 3, 1: (4,) * 3}, "2 in layer 0"),
    ):
        with pytest.raises(UserError, match=found):
            export(
                store,
                tmp_path / "out",
                FAMILY,
                format=format,
                levels=levels,
                progress=lambda done, total: None,
            )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change", [{"vocab": None}, {"merges": [1]}, {"vocab": {"a": 10**6}}, {"vocab": {"a": "b"}}], ids=str
)
def test_a_tokenizer_that_no_gguf_file_can_have_is_refused(store, tmp_path, change):
    """Whatever another library or our own look-up stumbles over, it is one error, and nothing is written."""
    shutil.copytree(store, other := tmp_path / "store")
    parsed = json.loads((other / "tokenizer.json").read_text())
    parsed["model"] |= change
    (other / "tokenizer.json").write_text(json.dumps(parsed))
    reseal(other, "tokenizer.json")
    with pytest.raises(ModelRefused, match="GGUF"):
        run_export(other, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_a_store_without_optional_files_has_a_gguf_file(store, tmp_path):
    """tokenizer_config.json is optional for a store, and so it is here."""
    shutil.copytree(store, other := tmp_path / "store")
    (other / "tokenizer_config.json").unlink()
    reseal(other, "tokenizer_config.json")
    run_export(other, tmp_path / "out", "gguf")
    assert (tmp_path / "out" / EXPORT_NAME).exists()
