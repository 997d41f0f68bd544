"""A store with codes that were chosen again: its products, its bytes after interruptions, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from family_models import random_model, save
from safetensors.torch import load_file
from small_store import flip
from small_tokenizer import a_tokenizer

from edgemoe.engine.engine import StoreModel
from edgemoe.errors import ChecksumMismatch, ModelRefused, UserError
from edgemoe.families.table import family_of
from edgemoe.policy.settings import RunSettings
from edgemoe.recode import coding, dense_choice
from edgemoe.recode.request import RecodeRequest
from edgemoe.recode.run import FOLDER, recode
from edgemoe.recode.sample import ExpertSample
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.compensators.making import compensate
from edgemoe.storage.compensators.reference import stored_weights
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.store.calibration import CALIBRATION_NAME
from edgemoe.storage.store.contents import describe
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.reader import RecordReader
from edgemoe.storage.store.verify import verify

TOKENS = 1024
"""Two windows."""


def files(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in store.iterdir() if path.is_file()}


def recoded(store: Path, source: Path, text: Path | None = None, **changes) -> Manifest:
    request = RecodeRequest(text, TOKENS, **({"favour": "low"} | changes))
    return recode(StoreModel.open(store), source, request)


@pytest.fixture(scope="module")
def uninterrupted(
    tiny_store: Path, checkpoint: Path, foxes_text: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """Name -> bytes of the files after a run without an interruption, on one thread."""
    store = tmp_path_factory.mktemp("recoded") / "store"
    shutil.copytree(tiny_store, store, ignore=shutil.ignore_patterns(CALIBRATION_NAME))
    recoded(store, checkpoint, foxes_text, threads=1)
    return files(store)


def stopped_after(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, calls: int) -> None:
    """Lets a method raise KeyboardInterrupt after some calls, as Ctrl-C does."""
    method, done = getattr(owner, name), []

    def counted(*args, **kwargs):
        result = method(*args, **kwargs)
        done.append(name)
        if len(done) == calls:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, counted)


@pytest.mark.e2e
def test_inner_products_lose_less_at_two_and_four_bits(damageable, checkpoint, foxes_text):
    """On the sampled inputs themselves, computed from the checkpoint's own tensors in float64."""
    before = weights_of(damageable)
    inputs = {}

    class Kept(ExpertSample):
        def end_window(self, window):
            super().end_window(window)
            if self.done == TOKENS // 512:
                inputs.update({layer: self.of_layer(layer) for layer in self.layers})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgemoe.recode.run.ExpertSample", Kept)
        made = recoded(damageable, checkpoint, foxes_text)
    after, source = weights_of(damageable), load_file(checkpoint / "model.safetensors")
    assert made.codes is not None
    assert set(inputs) == {0, 2}
    for level in (2, 4):
        lost = {"before": 0.0, "after": 0.0}
        for (layer, expert), old in before.items():
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            true = torch.cat([source[f"{name}.{part}_proj.weight"] for part in ("gate", "up")]).double()
            x, gates = (each.double() for each in inputs[layer].of_expert(expert))
            for when, kept in (("before", old), ("after", after[layer, expert])):
                lost[when] += float((((kept[level] - true) @ x.t()) * gates.t()).square().sum())
        assert lost["after"] < 0.8 * lost["before"]


def weights_of(store: Path) -> dict[tuple[int, int], dict[int, torch.Tensor]]:
    """(layer, expert) -> level -> gate_up as the store has it, float64."""
    manifest = Manifest.load(store)
    with RecordReader.open(store, manifest) as reader:
        return {
            (layer, expert): {
                level: stored_weights(reader, manifest, ExpertKey(layer, expert), level)[0].double()
                for level in (2, 4)
            }
            for layer in (0, 2)
            for expert in range(8)
        }


@pytest.mark.e2e
def test_the_bytes_do_not_depend_on_threads_or_limits(damageable, checkpoint, foxes_text, uninterrupted):
    opened = StoreModel.open(damageable)
    settings = RunSettings.uniform(8)
    least = opened.plan(vram_limit=None, settings=settings, context=512).minimum_vram_bytes
    recoded(damageable, checkpoint, foxes_text, threads=3, vram_limit=least)
    assert files(damageable) == uninterrupted


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (ExpertSample, "end_window", 1),
        (ExpertSample, "end_window", 2),
        (coding.RecodedLayers, "write", 1),
        (coding.Coding, "write", 1),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    damageable, checkpoint, foxes_text, uninterrupted, owner, name, calls
):
    """Stopped after a window, after a layer and before the end: usable meanwhile, and the same bytes in the end."""
    before = Manifest.load(damageable)
    with pytest.MonkeyPatch.context() as patch:
        stopped_after(patch, owner, name, calls)
        with pytest.raises(KeyboardInterrupt):
            recoded(damageable, checkpoint, foxes_text)
    assert Manifest.load(damageable) == before
    assert not verify(damageable, lambda done, total: None).damage
    recoded(damageable, checkpoint, foxes_text)
    assert files(damageable) == uninterrupted
    assert not (damageable / FOLDER).exists()


@pytest.mark.e2e
def test_a_recoded_store_is_whole_says_how_and_is_not_changed_again(damageable, checkpoint, foxes_text):
    """Measurements on the old codes go: the calibration of levels, and compensators."""
    (damageable / CALIBRATION_NAME).write_bytes(b"of the old codes")
    family = family_of(Checkpoint.open(checkpoint).config)
    compensate(
        None, damageable, family, base_level=2, rule="uniform", mean_rank=4, progress=lambda done, total: None
    )
    old = Manifest.load(damageable)
    made = recoded(damageable, checkpoint, foxes_text)
    assert made == Manifest.load(damageable)
    assert made.compensators is None
    assert not (damageable / CALIBRATION_NAME).exists()
    assert not verify(damageable, lambda done, total: None).damage
    assert {layer.file for layer in made.layers.values()} == {
        path.name for path in damageable.glob("experts-*")
    }
    assert made.coded_source != old.coded_source
    assert "calibrated on 1,024 tokens of foxes.txt" in describe(damageable)["codes"]
    before = {name: (damageable / name).stat().st_mtime_ns for name in files(damageable)}
    recoded(damageable, checkpoint, foxes_text)
    assert before == {name: (damageable / name).stat().st_mtime_ns for name in files(damageable)}
    other = recoded(damageable, checkpoint, foxes_text, favour="high")
    assert other.codes is not None
    assert other.codes.importance == {2: 1, 4: 8, 8: 64}


@pytest.mark.e2e
def test_another_checkpoint_is_refused(damageable, checkpoint, small_source, foxes_text, tmp_path):
    """Before anything is written; too short a text as well."""
    before = files(damageable)
    with pytest.raises(ModelRefused, match="the checkpoint that"):
        recoded(damageable, small_source, foxes_text)
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(UserError, match="at least 512 tokens"):
        recoded(damageable, checkpoint, short)
    assert files(damageable) == before


@pytest.mark.e2e
def test_a_damaged_sample_is_refused(damageable, checkpoint, foxes_text):
    """A bit of the inputs that changes between two runs; without the folder the run begins again."""
    with pytest.MonkeyPatch.context() as patch:
        stopped_after(patch, ExpertSample, "end_window", 2)
        with pytest.raises(KeyboardInterrupt):
            recoded(damageable, checkpoint, foxes_text)
    flip(damageable / FOLDER / "inputs.bin", 1000)
    with pytest.raises(ChecksumMismatch, match="sampled inputs of layer 0"):
        recoded(damageable, checkpoint, foxes_text)
    assert Manifest.load(damageable).codes is None
    shutil.rmtree(damageable / FOLDER)
    assert recoded(damageable, checkpoint, foxes_text).codes


@pytest.mark.e2e
def test_commands(run, checkpoint, tmp_path, foxes_text):
    """`convert --calibrate` makes the store that `convert` and `recode` make."""
    one, two = tmp_path / "one", tmp_path / "two"
    code, _, err = run("convert", checkpoint, one, "--calibrate", foxes_text, "--samples", TOKENS, "--json")
    assert code == 0, err
    assert "coding one" in err
    assert run("convert", checkpoint, two, "--json")[0] == 0
    code, out, err = run("recode", two, checkpoint, "--text", foxes_text, "--samples", TOKENS, "--json")
    assert code == 0, err
    assert "calibrated on 1,024 tokens of foxes.txt" in json.loads(out)["codes"]
    assert files(one) == files(two)
    code, _, err = run("convert", checkpoint, one, "--samples", TOKENS)
    assert code == 2
    assert "--calibrate" in err


@pytest.mark.e2e
def test_a_hybrid_writes_its_text_and_is_calibrated(run, tmp_path, monkeypatch):
    """A model of gated delta nets begins each window with an empty state; experts and dense weights get new codes."""
    monkeypatch.setattr(dense_choice, "WINDOWS", 1)
    source, store = tmp_path / "source", tmp_path / "store"
    save(random_model("qwen3_5_moe_text", max_position_embeddings=1024), source, fused=False)
    a_tokenizer().save_pretrained(source)
    options = ("--calibrate", "self", "--samples", TOKENS, "--dense-bits", "auto", "--json")
    code, out, err = run("convert", source, store, *options)
    assert code == 0, err
    made = json.loads(out)
    assert "calibrated on 1,024 tokens of a text of the model" in made["codes"]
    assert made["dense_bits"] in (4, 5, 6, 8)
    code, out, _ = run("verify", store, "--json")
    assert (code, json.loads(out)["ok"]) == (0, True)
