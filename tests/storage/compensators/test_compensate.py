"""storage/compensators/making.py: the files that a store gets, from which weights, and the refusals."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import small_checkpoint
import torch
from safetensors.torch import load_file, save_file
from small_compensation import add, tree
from small_conversion import FAMILY
from small_conversion import run as convert_small
from small_store import flip

from edgemoe.errors import DamagedData, MissingTensor, ModelRefused, StoreBusy, UserError
from edgemoe.families.table import family_of
from edgemoe.kernels.compensators import Compensators
from edgemoe.storage.base import ExpertKey, Plane
from edgemoe.storage.compensators.geometry import CompensatorGeometry
from edgemoe.storage.compensators.index import FOLDER
from edgemoe.storage.compensators.low_rank import corrections
from edgemoe.storage.compensators.making import compensate
from edgemoe.storage.compensators.reader import CompensatorReader
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.convert.run import convert
from edgemoe.storage.files.lock import StoreLock
from edgemoe.storage.files.unbuffered import aligned
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.manifest import MANIFEST_NAME, Manifest
from edgemoe.storage.store.reader import RecordReader

EXPERTS = small_checkpoint.LAYERS * small_checkpoint.EXPERTS
KEYS = [ExpertKey(i, e) for i in range(small_checkpoint.LAYERS) for e in range(small_checkpoint.EXPERTS)]


@pytest.fixture(scope="module")
def converted(small_source, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store without compensators. Read-only."""
    directory = tmp_path_factory.mktemp("converted")
    convert_small(small_source, directory)
    return directory


@pytest.fixture
def store(converted, tmp_path) -> Path:
    return shutil.copytree(converted, tmp_path / "store")


def stored(store: Path, key: ExpertKey, level: int) -> list[torch.Tensor]:
    """gate_up and down of an expert of a store at a level, by the reader of records."""
    manifest = Manifest.load(store)
    record = aligned(manifest.geometry.record_bytes)
    with RecordReader.open(store, manifest) as reader:
        reader.read(key, Plane.BASE, Plane.D8, [record.data])
    return decode(record, manifest.geometry, LAYOUTS[manifest.layout], level)


def corrected(store: Path, key: ExpertKey) -> list[torch.Tensor]:
    """gate_up and down of an expert's base level with its compensator."""
    manifest = Manifest.load(store)
    index = manifest.compensators
    assert index
    geometry = CompensatorGeometry.of(manifest.geometry, index.entry(key).ranks)
    with CompensatorReader(store, index) as reader:
        found = corrections(reader.load(key), geometry)
    base = stored(store, key, index.base_level)
    return [w + found[name].weights() for name, w in zip(("gate_up", "down"), base, strict=True)]


def squared(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return sum(float((a.float() - b).square().sum()) for a, b in zip(one, other, strict=True))


@pytest.mark.e2e
@pytest.mark.parametrize("rule", ["error", "kurtosis", "uniform"])
@pytest.mark.parametrize("base_level", [2, 4])
def test_a_compensated_level_is_nearer_to_the_weights(small_source, store, rule, base_level):
    """Every level and rule: the error that is left, by reading everything again, is the one in store.json; planes and
    other files are untouched; the budget is kept."""
    before = tree(store)
    made = add(small_source, store, rule=rule, base_level=base_level, mean_rank=5).compensators
    assert made
    assert made == Manifest.load(store).compensators
    weights = ExpertWeights(Checkpoint.open(small_source), FAMILY)
    left = sum(squared(list(weights.read(*key)), corrected(store, key)) for key in KEYS)
    plain = sum(squared(list(weights.read(*key)), stored(store, key, base_level)) for key in KEYS)
    assert made.error == pytest.approx((left / plain) ** 0.5, rel=1e-4)
    assert left < 0.92 * plain
    after = tree(store)
    del before[MANIFEST_NAME], after[MANIFEST_NAME]
    assert before.items() <= after.items()
    assert set(after) - set(before) == {f"{FOLDER}/{layer.file}" for layer in made.layers.values()}
    for layer in made.layers.values():
        uniform = CompensatorGeometry(small_checkpoint.HIDDEN, small_checkpoint.INNER, (5, 5, 5)).nbytes
        assert sum(entry.length for entry in layer.entries) <= uniform * len(layer.entries)
        ranks = [entry.ranks for entry in layer.entries]
        assert rule != "uniform" or set(ranks) == {(5, 5, 5)}
        assert rule == "error" or sum(map(sum, ranks)) <= 5 * 3 * len(ranks)


def test_error_ranks_leave_least(small_source, store):
    """At a budget of equal bytes the rule by error leaves less than equal ranks, and both less than kurtosis."""
    rules = ("error", "uniform", "kurtosis")
    error, uniform, kurtosis = (add(small_source, store, rule=rule).compensators for rule in rules)
    assert error.error < uniform.error < kurtosis.error
    assert error.nbytes <= uniform.nbytes


def test_the_highest_level_stands_for_the_weights(small_source, store):
    """Without a checkpoint: nearly the same error, and a reference that says so."""
    own = add(None, store).compensators
    assert own
    assert own.reference == "level 8"
    given = add(small_source, store).compensators
    assert given
    assert given.reference == Manifest.load(store).source
    assert own.error == pytest.approx(given.error, rel=0.01)


def test_a_store_with_compensators_is_the_same_to_a_reader_without_them(small_source, store):
    """The rule that readers of format 1 have always had: a key that they do not know is skipped. So store.json with
    its entry removed is the store.json of before, byte by byte, and an entry of a newer format is skipped too."""
    before = (store / MANIFEST_NAME).read_bytes()
    fingerprint = Manifest.load(store).fingerprint
    content = json.loads(before) | {"later": [1], "compensators": {"format": 2, "what": "ever"}}
    (store / MANIFEST_NAME).write_text(json.dumps(content))
    assert Manifest.load(store) == Manifest.parse(before, store)
    add(small_source, store)
    content = json.loads((store / MANIFEST_NAME).read_bytes())
    assert content.pop("later") == [1]
    del content["compensators"]
    assert json.dumps(content, separators=(",", ":")).encode() + b"\n" == before
    assert Manifest.load(store).fingerprint == fingerprint


@pytest.mark.e2e
def test_a_finished_run_is_not_repeated_and_another_replaces_it(small_source, store, monkeypatch):
    """A second run with the same options changes no byte and computes nothing; another leaves no file of the first."""
    add(small_source, store)
    first = tree(store)
    with monkeypatch.context() as patch:
        patch.setattr("edgemoe.storage.compensators.computation.compensator", None)
        add(small_source, store)
    assert tree(store) == first
    add(small_source, store, mean_rank=3)
    second = tree(store)
    assert len(second) == len(first)
    assert not {name for name in first if name.startswith(FOLDER)} & set(second)
    add(small_source, store)
    assert tree(store) == first


@pytest.mark.e2e
@pytest.mark.parametrize(
    "damage", [lambda path: flip(path, 9000), lambda path: os.truncate(path, 5000), os.unlink]
)
def test_the_same_command_mends_damaged_files(small_source, store, damage):
    """It is the action of the error that names the damage."""
    add(small_source, store)
    whole = tree(store)
    damage(next((store / FOLDER).glob("*")))
    assert tree(store) != whole
    add(small_source, store)
    assert tree(store) == whole


def test_conversion_leaves_a_compensated_store_as_it_is(small_source, store):
    """`convert` of the same checkpoint into a finished store with compensators returns at once."""
    add(small_source, store)
    before = tree(store)
    convert_small(small_source, store)
    assert tree(store) == before


def test_a_store_is_in_use_meanwhile(small_source, store):
    """Readers open and read the store during a run; a second run, and a converter, are refused."""
    seen = []

    def during(count: int, total: int) -> None:
        if count != 2:
            return
        manifest = Manifest.load(store)
        assert manifest.compensators is None
        stored(store, KEYS[0], 8)
        for attempt in (
            lambda: add(small_source, store, mean_rank=3),
            lambda: StoreLock(store, exclusive=True),
        ):
            with pytest.raises(StoreBusy):
                attempt()
        seen.append(count)

    add(small_source, store, progress=during)
    assert seen == [2]


def files_of(store: Path) -> set[str]:
    return {path.name for path in (store / FOLDER).iterdir()}


def test_files_stay_while_a_reader_may_open_them(small_source, store):
    """A run while a reader is open replaces the index alone; the next one without a reader removes the files."""
    first = add(small_source, store, mean_rank=3)
    before = files_of(store)
    with RecordReader.open(store, first) as reader:
        second = add(small_source, store, mean_rank=4)
        assert files_of(store) > before
        assert reader.read(KEYS[0], Plane.BASE, Plane.BASE, [aligned(first.geometry.prefix_bytes(2)).data])
        of_first = Compensators.of_store(store, first)
        assert of_first.of(KEYS[0])
        of_first.close()
    assert add(small_source, store, mean_rank=4) == second
    assert files_of(store) == {layer.file for layer in second.compensators.layers.values()}
    assert not files_of(store) & before


def test_a_late_reader_is_refused_by_name(small_source, store):
    """Its manifest names removed files; a missing file of the present index is damage."""
    first = add(small_source, store, mean_rank=3)
    second = add(small_source, store, mean_rank=4)
    with pytest.raises(StoreBusy, match="run the command again"):
        Compensators.of_store(store, first)
    Compensators.of_store(store, second).close()
    next((store / FOLDER).iterdir()).unlink()
    with pytest.raises(MissingTensor, match="edgemoe compensate"):
        Compensators.of_store(store, second)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base_level": 8}, "level 2 or 4 to compensate, got 8: choose --residual 2 or 4"),
        ({"rule": "best"}, "choose --ranks error, kurtosis or uniform"),
        ({"mean_rank": 0}, "a mean rank from 1 to 32"),
        ({"mean_rank": 33}, "a mean rank from 1 to 32"),
    ],
)
def test_options_out_of_range_are_refused(small_source, store, options, words):
    before = tree(store)
    with pytest.raises(UserError, match=words):
        add(small_source, store, **options)
    assert tree(store) == before


def changed(source: Path, to: Path, change) -> Path:
    """A copy of the small checkpoint with other weights."""
    shutil.copytree(source, to)
    for name in small_checkpoint.SHARDS:
        made = {key: change(key, tensor).contiguous() for key, tensor in load_file(to / name).items()}
        save_file(made, to / name, {"format": "pt"})
    return to


def test_weights_of_another_model_are_refused(small_source, store, tmp_path):
    """One expert with other weights is named; weights that were rounded otherwise are used."""

    def other(key: str, tensor: torch.Tensor) -> torch.Tensor:
        wrong = "layers.1.mlp.experts.2.down" in key
        return torch.randn_like(tensor.float()).bfloat16() if wrong else tensor

    with pytest.raises(ModelRefused, match=r"others in layer 1, expert 2: they differ by \d"):
        add(changed(small_source, tmp_path / "other", other), store)
    rounded = changed(
        small_source, tmp_path / "rounded", lambda key, tensor: (tensor.float() * 1.02).bfloat16()
    )
    made = add(rounded, store).compensators
    assert made
    assert made.reference == Checkpoint.open(rounded).fingerprint() != Manifest.load(store).source


def test_a_checkpoint_of_another_shape_is_refused(store, tmp_path):
    """The field that differs is named, with both values."""
    source = small_checkpoint.save(tmp_path / "few")
    config = small_checkpoint.CONFIG | {"num_hidden_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    for name in small_checkpoint.SHARDS:
        tensors = load_file(source / name)
        save_file({k: v for k, v in tensors.items() if "layers.1." not in k}, source / name, {"format": "pt"})
    files = json.loads((source / small_checkpoint.INDEX).read_text())["weight_map"]
    (source / small_checkpoint.INDEX).write_text(
        json.dumps({"weight_map": {k: v for k, v in files.items() if "layers.1." not in k}})
    )
    with pytest.raises(ModelRefused, match=r"layers with experts \[0, 1\].*got \[0\]"):
        add(source, store)


def test_weights_that_a_level_keeps_exactly_are_refused(small_source, tmp_path):
    """Level 4 of a store up to level 4 has no higher level to learn from; a store of level 8 has."""
    convert(
        small_source,
        tmp_path / "four",
        FAMILY,
        max_level=4,
        layout=LAYOUTS["cpu-generic"],
        dense_bits=16,
        progress=lambda done, total: None,
    )
    with pytest.raises(ModelRefused, match=r"more than 4 bits .* without a higher level: give --reference"):
        add(None, tmp_path / "four", base_level=4)
    assert add(None, tmp_path / "four", base_level=2).compensators
    assert add(small_source, tmp_path / "four", base_level=4).compensators


def test_four_bit_codes_are_refused_for_level_4_by_their_format(small_source, store, monkeypatch):
    """The message names the format and the directory; level 2 of the same checkpoint is compensated."""
    monkeypatch.setattr(ExpertWeights, "has_codes", lambda self, max_level: True)
    with pytest.raises(ModelRefused, match=rf"4-bit codes \(safetensors\) in {small_source}"):
        add(small_source, store, base_level=4)
    assert add(small_source, store, base_level=2).compensators


def test_a_source_that_changes_meanwhile_is_refused(small_source, store, tmp_path):
    """The index is not written."""
    source = Path(shutil.copytree(small_source, tmp_path / "source"))

    def change(count: int, total: int) -> None:
        if count == total:
            (source / "tokenizer.json").write_text("{}")

    with pytest.raises(DamagedData, match="unchanged while it was read"):
        add(source, store, progress=change)
    assert Manifest.load(store).compensators is None


@pytest.mark.e2e
def test_a_store_of_another_layout_of_tensors_has_the_same_factors(checkpoint, fused_checkpoint, tmp_path):
    """Experts as separate tensors, or as one tensor for all of a layer."""
    found = []
    for source in (checkpoint, fused_checkpoint):
        store = tmp_path / source.name
        family = family_of(Checkpoint.open(source).config)
        layout, silent = LAYOUTS["cpu-avx2"], lambda done, total: None
        convert(source, store, family, max_level=8, layout=layout, dense_bits=16, progress=silent)
        options = {"base_level": 2, "rule": "error", "mean_rank": 3, "progress": silent}
        index = compensate(source, store, family, **options).compensators
        assert index
        found.append({number: layer.entries for number, layer in index.layers.items()})
    one, other = found
    assert set(one) == {0, 2}
    assert {n: [e.checksum for e in layer] for n, layer in one.items()} == {
        n: [e.checksum for e in layer] for n, layer in other.items()
    }


def test_a_read_only_store_is_a_user_error(small_source, store, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", "there")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(UserError, match="may write to"):
        add(small_source, store)
