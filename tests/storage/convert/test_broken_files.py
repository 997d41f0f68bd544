"""Broken checkpoints and stores, listed and random: every command ends with a one-line message, not a traceback."""

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

from edgemoe.errors import DamagedData, EdgemoeError, ModelRefused
from edgemoe.families.table import family_of
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.convert.run import convert
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.manifest import MANIFEST_NAME


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
    """A checkpoint, and its store in the same directory."""
    directory = tmp_path_factory.mktemp("good")
    make(small_checkpoint.save(directory / "model"), directory / "store")
    return directory


@pytest.mark.e2e
@pytest.mark.parametrize(("damage", "code"), broken_files.CHECKPOINTS.values(), ids=broken_files.CHECKPOINTS)
def test_a_broken_checkpoint_is_not_converted(run, good, tmp_path, damage, code):
    """convert exits with 2 or 4, prints one line on stderr, and leaves no store."""
    source = Path(shutil.copytree(good / "model", tmp_path / "model"))
    damage(source)
    got, _, err = run("convert", source, tmp_path / "store")
    said = [line for line in err.splitlines() if not line.startswith("converting ")]
    assert (got, len(said)) == (code, 1), err
    assert said[0].startswith("edgemoe: ")
    assert not (tmp_path / "store" / MANIFEST_NAME).exists()


@pytest.mark.e2e
def test_the_checkpoint_of_the_corpus_converts_unbroken(run, good, tmp_path):
    """The checkpoint converts without its fault, so every entry is refused for its own fault."""
    assert run("convert", good / "model", tmp_path / "store")[0] == 0
    assert run("verify", good / "store")[0] == 0


@pytest.mark.e2e
@pytest.mark.parametrize(("damage", "code"), broken_files.STORES.values(), ids=broken_files.STORES)
def test_a_broken_store_is_found(run, good, tmp_path, damage, code):
    """verify exits with 4, or 2 without a store, and no command ends with a traceback."""
    store = Path(shutil.copytree(good / "store", tmp_path / "store"))
    damage(store)
    assert run("verify", store)[0] == code
    assert run("inspect", store)[0] in (0, code)


@pytest.mark.e2e
def test_the_corpus_can_be_written_as_files(tmp_path):
    """As a script, the corpus writes one directory per entry and prints their descriptions."""
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
@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=3))
def test_any_value_in_a_config_is_bounded_or_refused(changes):
    """A config with any value at any key is refused, or its sizes are within bounds."""
    try:
        config = bounded_config(small_checkpoint.CONFIG | changes)
        family = family_of(config)
        layers, experts = family.moe_layers, family.experts
    except ModelRefused:
        return
    assert len(layers) <= 1024
    assert 1 <= experts <= 4096


@pytest.mark.e2e
@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(keys), values, max_size=2) | values)
def test_any_config_with_good_weights_raises_no_other_error(good, changes):
    """A checkpoint with any JSON as config.json is opened and checked, or refused."""
    config = small_checkpoint.CONFIG | changes if isinstance(changes, dict) else changes
    assert_only_typed(good, "config.json", json.dumps(config).encode())


@pytest.mark.e2e
@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from([*small_checkpoint.tensors(), "x"]), values, max_size=3)
    | st.fixed_dictionaries({"weight_map": values})
    | values
)
def test_any_index_raises_no_other_error(good, index):
    """A checkpoint with any JSON as index is opened and checked, or refused."""
    if isinstance(index, dict) and "weight_map" not in index:
        whole = json.loads((good / "model" / small_checkpoint.INDEX).read_text())["weight_map"]
        index = {"weight_map": whole | index}
    assert_only_typed(good, small_checkpoint.INDEX, json.dumps(index).encode())


@pytest.mark.e2e
@settings(max_examples=40)
@given(st.binary(max_size=40), st.integers(0, 400))
def test_any_bytes_in_a_shards_header_raise_no_other_error(good, raw, at):
    """A shard with its first bytes overwritten is read or refused, with no other error."""
    name = small_checkpoint.SHARDS[1]
    whole = bytearray((good / "model" / name).read_bytes())
    whole[at : at + len(raw)] = raw
    assert_only_typed(good, name, bytes(whole))


def assert_only_typed(good: Path, name: str, raw: bytes) -> None:
    """Converts the checkpoint with one file changed, and allows only errors of the tree."""
    with tempfile.TemporaryDirectory() as work:
        source = Path(shutil.copytree(good / "model", Path(work) / "model"))
        (source / name).write_bytes(raw)
        try:
            make(source, Path(work) / "store")
        except EdgemoeError as error:
            assert isinstance(error, ModelRefused | DamagedData), error
