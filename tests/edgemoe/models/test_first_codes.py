"""A model's first use calibrates its codes, goes on after a kill, and leaves it out where an option or time says so."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from programs import run_child_forked

from edgemoe.models.cache import find_cached, note_path, remove
from edgemoe.models.conversion import calibration_run, first_codes
from edgemoe.models.conversion.calibration_time import calibration_seconds
from edgemoe.models.resolve import resolve_store
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.store.manifest import Manifest


@pytest.fixture
def calibrating(monkeypatch, tmp_path):
    """Calibrates every first use, on one window of text, in an empty cache."""
    monkeypatch.setattr(first_codes, "LONGEST", 1e9)
    monkeypatch.setattr(calibration_run, "SAMPLES", 512)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.e2e
def test_a_first_use_calibrates_and_a_killed_one_goes_on(run, calibrating, monkeypatch, capsys, checkpoint):
    """The store answers before; the next use of the model calibrates experts and measures dense weights, once."""
    with monkeypatch.context() as patch:
        patch.setattr(calibration_run, "run", lambda *parts: -9)
        store = resolve_store(checkpoint, calibrate=True)
    err = capsys.readouterr().err
    assert "tiny is calibrated once it is converted, in about 9 s" in err
    assert Manifest.load(store).codes is None
    assert note_path(store).exists()
    (store / calibration_run.FOLDER).mkdir()
    monkeypatch.setattr(calibration_run.subprocess, "run", run_child_forked)
    assert run("pull", checkpoint)[0] == 0
    made = Manifest.load(store)
    assert made.codes is not None
    assert made.codes.tokens == 512
    assert made.dense_choice is not None
    assert made.dense_bits == made.dense_choice.bits
    assert not note_path(store).exists()
    monkeypatch.setattr(calibration_run, "run", lambda *parts: pytest.fail("a second calibration"))
    assert resolve_store(checkpoint, calibrate=True) == store


def test_what_is_not_calibrated(calibrating, monkeypatch, checkpoint, tiny_store, tmp_path):
    """Nothing is where an option says so, on a full disk, in little memory, in too long a time, or once it exists."""
    store, headers = tmp_path / "stores" / "new", Checkpoint.open(checkpoint)

    def planned(store: Path = store, *, calibrate: bool = True) -> bool:
        return first_codes.FirstCodes(store, "cpu-avx2", None, calibrate).planned(headers)

    assert planned()
    assert not planned(calibrate=False)
    assert not planned(tiny_store)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
        assert not planned()
    with monkeypatch.context() as patch:
        patch.setattr(first_codes, "available_memory", lambda: 1_000_000_000)
        assert not planned()
    monkeypatch.setattr(first_codes, "LONGEST", calibration_seconds(headers))
    assert not planned()


def test_dense_weights_are_measured_on_a_cpu_alone(calibrating, checkpoint, tmp_path):
    """A store for a GPU has 8 bits at once, one for a CPU bf16 until they are measured; an option goes first."""
    headers = Checkpoint.open(checkpoint)
    for layout, given, bits in (("cuda", None, 8), ("cpu-avx2", None, 16), ("cpu-avx2", 8, 8)):
        codes = first_codes.FirstCodes(tmp_path / "new", layout, given, True)
        assert codes.conversion_bits(headers, 8) == bits


def test_a_failed_calibration_leaves_the_store_as_it_is(calibrating, monkeypatch, capsys, checkpoint):
    """A refusal is said once and not repeated; a removed store leaves no note."""
    monkeypatch.setattr(calibration_run, "run", lambda *parts: 3)
    store = resolve_store(checkpoint, calibrate=True)
    assert "is not calibrated, and is used as it is" in capsys.readouterr().err
    assert not note_path(store).exists()
    note_path(store).write_text("{}")
    assert resolve_store(checkpoint, calibrate=True) == store  # a damaged note is removed
    assert not note_path(store).exists()
    note_path(store).write_text("{}")
    remove(find_cached(store.name))
    assert not note_path(store).exists()


def test_a_calibration_belongs_to_one_process_and_to_the_uses_that_want_it(
    calibrating, monkeypatch, capsys, checkpoint
):
    """Another process that follows the note leaves it alone, as does a use with plain codes; kills are counted."""
    with monkeypatch.context() as patch:
        patch.setattr(calibration_run, "run", lambda *parts: -9)
        store = resolve_store(checkpoint, calibrate=True)
    with monkeypatch.context() as patch:
        patch.setattr(calibration_run, "run", lambda *parts: pytest.fail("a calibration"))
        with calibration_run.locked(note_path(store)) as is_free:
            assert is_free
            resolve_store(checkpoint, calibrate=True)
        assert "is being calibrated by another process" in capsys.readouterr().err
        resolve_store(checkpoint, calibrate=False)
        assert note_path(store).exists()
    monkeypatch.setattr(calibration_run, "run", lambda *parts: -9)
    for _ in range(first_codes.MOST_KILLS - 1):
        assert note_path(store).exists()
        resolve_store(checkpoint, calibrate=True)
    assert not note_path(store).exists()


def test_the_run_takes_none_of_the_users_options(monkeypatch, tiny_store, tmp_path):
    """Variables and the file of options may say what a calibration cannot have, such as --keep-source."""
    monkeypatch.setenv("EDGEMOE_KEEP_SOURCE", "1")
    runs = []

    def run(command, **options):
        runs.append((command, options["env"], Path(command[-1]).read_text()))
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(calibration_run.subprocess, "run", run)
    assert calibration_run.run(tmp_path, tiny_store, "auto") == 3
    (first, environment, config), (second, *_) = runs
    assert "--calibrate" in first
    assert "--calibrate" not in second  # at least dense weights are measured
    assert (config, "EDGEMOE_KEEP_SOURCE" in environment, "PATH" in environment) == ("", False, True)
