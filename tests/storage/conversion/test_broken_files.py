"""Broken checkpoints and stores, listed and random: one line that says what is wrong, and never a traceback."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import broken_files
import pytest
import small_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from edgemoe.cli import main
from edgemoe.families.table import family_of
from storage.checkpoint import Checkpoint, bounded_config
from storage.convert import convert
from storage.errors import DamagedData, EdgemoeError, ModelRefused
from storage.layout import LAYOUTS
from storage.manifest import MANIFEST_NAME


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command in this process: (exit code, stderr)."""

    def run_main(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["edgemoe", *map(str, arguments)])
        capsys.readouterr()
        code = main()
        return code, capsys.readouterr().err

    return run_main


def make(source: Path, destination: Path) -> None:
    convert(
        source,
        destination,
        family_of(Checkpoint.open(source).config),
        max_level=8,
        layout=LAYOUTS["cpu-generic"],
        dense_bits=16,
        progress=lambda done, total: None,
        threads=1,
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A checkpoint, and its store beside it."""
    directory = tmp_path_factory.mktemp("good")
    make(small_checkpoint.save(directory / "model"), directory / "store")
    return directory


@pytest.mark.parametrize(("spoil", "code"), broken_files.CHECKPOINTS.values(), ids=broken_files.CHECKPOINTS)
def test_a_broken_checkpoint_is_not_converted(run, good, tmp_path, spoil, code):
    """convert exits 2 or 4 with one line on stderr, and leaves no store."""
    source = Path(shutil.copytree(good / "model", tmp_path / "model"))
    spoil(source)
    got, err = run("convert", source, tmp_path / "store")
    said = [line for line in err.splitlines() if not line.startswith("converting ")]
    assert (got, len(said)) == (code, 1), err
    assert said[0].startswith("edgemoe: ")
    assert not (tmp_path / "store" / MANIFEST_NAME).exists()


def test_the_checkpoint_that_the_corpus_breaks_is_whole(run, good, tmp_path):
    """So every entry is refused for what it says of itself."""
    assert run("convert", good / "model", tmp_path / "store")[0] == 0
    assert run("verify", good / "store")[0] == 0


@pytest.mark.parametrize(("spoil", "code"), broken_files.STORES.values(), ids=broken_files.STORES)
def test_a_broken_store_is_found(run, good, tmp_path, spoil, code):
    """verify exits 4 (2 where there is no store at all), and no command ends in a traceback."""
    store = Path(shutil.copytree(good / "store", tmp_path / "store"))
    spoil(store)
    assert run("verify", store)[0] == code
    assert run("inspect", store)[0] in (0, code)


@pytest.mark.e2e
def test_the_corpus_can_be_written_for_others(tmp_path):
    """As a script it makes one directory an entry, and says what each is."""
    done = subprocess.run(
        [sys.executable, broken_files.__file__, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == len(broken_files.CHECKPOINTS) == len(list(tmp_path.iterdir()))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 9)
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from(small_checkpoint.SHARDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)
keys = [*small_checkpoint.CONFIG, "num_local_experts", "mlp_only_layers", "decoder_sparse_step", "head_dim"]


@pytest.mark.e2e
@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=3))
def test_any_value_in_a_config_is_bounded_or_refused(changes):
    """Whatever stands for any key, a config is refused by type or sizes that a machine can hold."""
    try:
        config = bounded_config(small_checkpoint.CONFIG | changes)
        family = family_of(config)
        layers, experts = family.moe_layers(config), family.experts(config)
    except ModelRefused:
        return
    assert len(layers) <= 1024
    assert 1 <= experts <= 4096


@pytest.mark.e2e
@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(keys), values, max_size=2) | values)
def test_any_config_beside_good_weights_raises_nothing_else(good, changes):
    """A checkpoint whose config.json is any JSON is opened and checked, or refused."""
    config = small_checkpoint.CONFIG | changes if isinstance(changes, dict) else changes
    assert_only_typed(good, "config.json", json.dumps(config).encode())


@pytest.mark.e2e
@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*small_checkpoint.tensors(), "x"]), values, max_size=3)
    | st.fixed_dictionaries({"weight_map": values})
    | values
)
def test_any_index_raises_nothing_else(good, index):
    """The same for the index of a sharded checkpoint."""
    if isinstance(index, dict) and "weight_map" not in index:
        whole = json.loads((good / "model" / small_checkpoint.INDEX).read_text())["weight_map"]
        index = {"weight_map": whole | index}
    assert_only_typed(good, small_checkpoint.INDEX, json.dumps(index).encode())


@pytest.mark.e2e
@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 400))
def test_any_bytes_in_a_shards_header_raise_nothing_else(good, raw, at):
    """Bytes written over the start of a shard: it is read, or refused; what it says is never believed blindly."""
    name = small_checkpoint.SHARDS[1]
    whole = bytearray((good / "model" / name).read_bytes())
    whole[at : at + len(raw)] = raw
    assert_only_typed(good, name, bytes(whole))


def assert_only_typed(good: Path, name: str, raw: bytes) -> None:
    """Converts the checkpoint with one file changed; only errors of the tree may come of it."""
    with tempfile.TemporaryDirectory() as work:
        source = Path(shutil.copytree(good / "model", Path(work) / "model"))
        (source / name).write_bytes(raw)
        try:
            make(source, Path(work) / "store")
        except EdgemoeError as error:
            assert isinstance(error, ModelRefused | DamagedData), error
