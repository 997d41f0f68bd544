"""models.heat: how hot experts were is kept, checked when it is read, and decides what is warmed up first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from engine_rig import PROMPT

from edgemoe.models import heat as heat_module
from edgemoe.models.heat import NAME, keeping_heat, load_heat, mixed, save_heat
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.store.manifest import Manifest

A, B, C = ExpertKey(0, 0), ExpertKey(0, 1), ExpertKey(2, 2)


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """An empty directory in the place of a store; the cache lies next to it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def manifest(tiny_store) -> Manifest:
    """The manifest of a store of two layers."""
    return Manifest.load(tiny_store)


def test_what_is_saved_is_loaded(directory, manifest):
    """With every expert of the store, to four digits."""
    save_heat(directory, manifest, {A: 1.0, C: 0.12343})
    heat = load_heat(directory, manifest)
    assert {key: value for key, value in heat.items() if value} == {A: 1.0, C: 0.1234}
    assert len(heat) == sum(len(layer.records) for layer in manifest.layers.values())


def test_without_a_file_there_is_none(directory, manifest, caplog):
    """No warning either."""
    assert load_heat(directory, manifest) == {}
    assert not caplog.records


def changed(**values: object) -> Callable[[Path], object]:
    """Replaces values and leaves the checksum."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | values))


def resealed(**values: object) -> Callable[[Path], object]:
    """Replaces values and the checksum."""

    def edit(path: Path) -> None:
        content = json.loads(path.read_text()) | values
        del content["checksum"]
        path.write_text(json.dumps(content | {"checksum": heat_module._checksum(content)}))

    return edit


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_bytes(b"\x00" * 100),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text("{}"),
        lambda path: path.write_bytes(b" " * (40 << 20)),
        lambda path: (path.unlink(), path.mkdir()),
        changed(source="another"),
        changed(layers={}),
        resealed(version=2),
        resealed(source="another"),
        resealed(layers=[]),
        resealed(layers={"0": [1.0]}),
        resealed(layers={"0": [float("nan")] * 8, "2": [0.0] * 8}),
        resealed(layers={"0": ["1"] * 8, "2": [0.0] * 8}),
        resealed(layers={"0": [2.0] * 8, "2": [0.0] * 8}),
    ],
)
def test_a_damaged_file_is_a_warning_that_names_it(directory, manifest, caplog, damage):
    """It is not used; the next run's replaces it, unless it is no file."""
    save_heat(directory, manifest, {A: 1.0})
    damage(directory / NAME)
    assert load_heat(directory, manifest) == {}
    assert str(directory / NAME) in caplog.text
    save_heat(directory, manifest, {B: 1.0})
    assert load_heat(directory, manifest)[B] == 1.0 or (directory / NAME).is_dir()


def test_a_store_that_cannot_be_written_to_keeps_it_in_the_cache(directory, manifest, monkeypatch):
    """The cache's file is named after the model and is found again; a full disk there is a warning."""
    monkeypatch.setattr(heat_module, "NAME", "missing/heat.json")
    monkeypatch.setattr(heat_module.Path, "mkdir", _refusing(directory, Path.mkdir))
    save_heat(directory, manifest, {A: 1.0})
    assert load_heat(directory, manifest)[A] == 1.0
    assert not list(directory.iterdir())


def _refusing(directory: Path, mkdir: Callable[..., None]) -> Callable[..., None]:
    """A mkdir that fails inside of a directory, as on a read-only disk."""

    def refuse(path: Path, *arguments: object, **options: object) -> None:
        if path.is_relative_to(directory):
            raise OSError(30, "Read-only file system")
        mkdir(path, *arguments, **options)

    return refuse


def test_nothing_can_be_written(directory, manifest, monkeypatch, caplog):
    """Neither there nor in the cache: a warning with the reason."""
    monkeypatch.setattr(heat_module, "heat_directory", lambda: directory / "file" / "cache")
    (directory / "file").write_text("")
    (directory / NAME).mkdir()
    save_heat(directory, manifest, {A: 1.0})
    assert "hot experts are not kept" in caplog.text


def test_earlier_runs_count_half():
    """Each layer relative to its hottest expert."""
    assert mixed({A: 0.5, B: 0.25}, {B: 8.0, C: 4.0}) == {A: 0.5, B: 0.75, C: 0.5}
    assert mixed({}, {}) == {}


def test_a_run_keeps_its_heat_at_the_end_and_on_the_way(directory, manifest, monkeypatch):
    """After an answer, also where the block ends by an error; without one nothing is written."""
    with keeping_heat(directory, manifest, lambda: {A: 1.0}):
        pass
    assert not list(directory.iterdir())
    with ExitStack() as stack:
        before, answered = stack.enter_context(keeping_heat(directory, manifest, lambda: {A: 1.0}))
        assert before == {}
        answered()
        assert not list(directory.iterdir())
        monkeypatch.setattr(heat_module, "SAVE_SECONDS", 0.0)
        answered()
        assert load_heat(directory, manifest)[A] == 0.5
        (directory / NAME).unlink()
        assert not stack.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    with keeping_heat(directory, manifest, lambda: {}) as (before, _):
        assert before[A] == 0.5


def test_a_chat_keeps_the_experts_that_it_used(tiny_store, tmp_path, run):
    """The hottest experts of the file are the ones that the answer's routing named most often."""
    store = Path(shutil.copytree(tiny_store, tmp_path / "store"))
    assert run("chat", "--model", store, "--prompt", "abc", "--max-new-tokens", 4)[0] == 0
    heat = load_heat(store, Manifest.load(store))
    assert 0 < sum(value > 0 for value in heat.values()) <= len(heat)


@pytest.mark.parametrize("eviction", ["lfru", "lru-planes", "lru-experts"])
def test_the_next_start_warms_up_the_hottest_first(tiny_store, open_engine, eviction):
    """With room for six experts these are the six hottest, in any layer."""
    engine = open_engine(tiny_store, experts=6, level=4, eviction=eviction)
    engine.prefill(engine.sequences.new(), PROMPT)
    heat = engine.vram.heat()
    assert heat
    assert all(0 < value <= 1 for value in heat.values())
    engine.forget_experts()
    wanted = {
        ExpertKey(layer, expert): 1 - (3 * layer + expert) / 100 for layer in (0, 2) for expert in (1, 4, 6)
    }
    engine.fill_first(wanted)
    engine.fill()
    assert set(engine.vram.resident()) == set(wanted)
    assert engine.shape.experts > 6
