"""A calibration against an independent computation, and one that is killed against one that is not."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import ForkedPython
from small_store import flip
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from edgemoe.calibrate import run as run_module
from edgemoe.calibrate.run import CalibrationRequest, calibrate
from edgemoe.calibrate.state import UNFINISHED_NAME, CalibrationState
from edgemoe.calibrate.windows import spread_windows, written_window
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.models import cache
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.demo import DEMO
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.record.planes import dequantize, quantize
from edgemoe.storage.store.calibration import (
    CALIBRATION_NAME,
    RANDOM,
    TEXT,
    WRITTEN,
    Calibration,
    load_calibration,
)

LEVELS = (8, 4, 2)
WINDOW, TOKENS = 128, 256
"""Tokens of a window here, a quarter of the product's; two windows."""

CALIBRATE = f"""
import sys
from pathlib import Path
from edgemoe.calibrate import run
from edgemoe.engine.engine import StoreModel
run.WINDOW = {WINDOW}
run.calibrate(StoreModel.open(Path(sys.argv[1])), run.CalibrationRequest(None, {TOKENS}))
"""
"""A program that calibrates a store with the windows of these tests."""


@pytest.fixture(scope="module", autouse=True)
def short_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "WINDOW", WINDOW)
        yield


@pytest.fixture
def store(damageable: Path) -> Path:
    (damageable / CALIBRATION_NAME).unlink(missing_ok=True)
    return damageable


@pytest.fixture(scope="module")
def uninterrupted(tiny_store: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a run without an interruption."""
    store = tmp_path_factory.mktemp("calibrated") / tiny_store.name
    shutil.copytree(tiny_store, store, ignore=shutil.ignore_patterns(CALIBRATION_NAME))
    measure(store)
    return (store / CALIBRATION_NAME).read_bytes()


def measure(store: Path, text: Path | None = None, **changes) -> Calibration:
    return calibrate(StoreModel.open(store), CalibrationRequest(text, TOKENS, **changes))


def at_level(weights: torch.Tensor, level: int) -> torch.Tensor:
    """Matrices [E, N, K] as a store has them at a level; groups of 64, or of 32 where K has no more."""
    experts, rows, cols = weights.shape
    group = 64 if cols % 64 == 0 else 32
    codes, parameters = quantize(weights.reshape(-1, cols), group)
    return dequantize(codes, parameters, level).view(experts, rows, cols)


def independent_errors(model, windows) -> tuple[np.ndarray, np.ndarray]:
    """Sums [layers, experts, 4] of squared errors and of tokens, by transformers in float32 and plain matrices."""
    squared, counts = np.zeros((2, 8, 4)), np.zeros((2, 8), int)
    layers = []

    def experts(module, hidden, index, weights):
        row = layers.index(module) if module in layers else (layers.append(module), len(layers) - 1)[1]
        matrices = {
            level: (at_level(module.gate_up_proj.float(), level), at_level(module.down_proj.float(), level))
            for level in LEVELS
        }

        def output(x, expert, level):
            gate, up = (x @ matrices[level][0][expert].T).chunk(2, -1)
            return (torch.nn.functional.silu(gate) * up) @ matrices[level][1][expert].T

        out = torch.zeros_like(hidden)
        for expert in range(8):
            token, slot = (index == expert).nonzero(as_tuple=True)
            x = hidden[token].float()
            best = output(x, expert, 8)
            for column, level in ((1, 4), (2, 2)):
                squared[row, expert, column] += float((output(x, expert, level) - best).square().sum())
            squared[row, expert, 3] += float(best.square().sum())
            counts[row, expert] += len(token)
            out.index_add_(0, token, (best * weights[token, slot, None].float()).to(out.dtype))
        return out

    ALL_EXPERTS_FUNCTIONS.register("independent", experts)
    before = model.config._experts_implementation
    model.set_experts_implementation("independent")
    try:
        with torch.inference_mode():
            for window in windows:
                model(torch.tensor([window]))
    finally:
        model.set_experts_implementation(before)
    return squared, counts


@pytest.mark.e2e
def test_errors_equal_an_independent_computation(store, tiny_model, foxes_text):
    """Of every expert with enough tokens, within what 8-bit activations and a router's rare other choice explain."""
    made = measure(store, foxes_text)
    assert (made.origin, made.measured_on) == (TEXT, "256 tokens of foxes.txt")
    windows = spread_windows(load_tokenizer(store), foxes_text, TOKENS, WINDOW)
    squared, counts = independent_errors(tiny_model, windows)
    assert len(windows) == 2
    assert made.layers == (0, 2)
    of_layer = squared.sum(1, keepdims=True) / counts.sum(1)[:, None, None]
    want = (squared + 8 * of_layer) / (counts[..., None] + 8)
    assert (counts > 15).sum() > 10
    assert made.error[..., 0].max() == 0
    np.testing.assert_allclose(made.error[..., 1:], want[..., 1:], rtol=0.1)
    assert made.chosen.shape == made.gates.shape == (2, TOKENS, 2)
    assert (made.sensitivity > 0).all()


@pytest.mark.e2e
def test_a_result_does_not_depend_on_limits(store, uninterrupted):
    """With blocks for few experts the file has the same bytes as with all of them resident."""
    opened = StoreModel.open(store)
    settings = RunSettings.uniform(8)
    least = opened.plan(vram_limit=None, settings=settings, context=WINDOW).minimum_vram_bytes
    measure(store, vram_limit=least)
    assert (store / CALIBRATION_NAME).read_bytes() == uninterrupted


@pytest.fixture
def interrupted(monkeypatch):
    """Interrupts runs after some numbers of parts, counted over all runs: (these numbers, the saved parts)."""
    save, at, done = CalibrationState.save, set(), []

    def counted(state):
        save(state)
        done.append(state)
        if len(done) in at:
            raise KeyboardInterrupt

    monkeypatch.setattr(CalibrationState, "save", counted)
    return at, done


@pytest.mark.e2e
@pytest.mark.parametrize("saves", [1, 5])
def test_a_resumed_run_equals_an_uninterrupted_one(store, uninterrupted, interrupted, saves):
    """A run stopped after one of its parts, and run again, gives equal bytes, repeats no part, and leaves no file."""
    at, done = interrupted
    at.add(saves)
    with pytest.raises(KeyboardInterrupt):
        measure(store)
    assert (store / UNFINISHED_NAME).exists()
    assert not (store / CALIBRATION_NAME).exists()
    measure(store)
    assert (store / CALIBRATION_NAME).read_bytes() == uninterrupted
    assert not (store / UNFINISHED_NAME).exists()
    assert len(done) == 6


@pytest.mark.e2e
def test_a_written_text_follows_the_models_distribution(store, open_engine):
    """Every token is drawn from what the model predicts: their mean surprise is the predictions' entropy."""
    engine = open_engine(store, levels=(8,), exact=True)
    sequence = engine.sequences.new()
    surprise, entropy, texts = [], [], set()
    for number in range(6):
        window = written_window(engine, sequence, number)
        assert len(window) == sequence.context
        assert window == written_window(engine, sequence, number)
        texts.add(window)
        sequence.crop(0)
        predicted = engine.all_logits(sequence, window, decode=True).log_softmax(-1)[:-1]
        surprise += (-predicted.gather(1, torch.tensor(window[1:])[:, None])).squeeze(1).tolist()
        entropy += (-(predicted.exp() * predicted).sum(-1)).tolist()
    assert len(texts) == 6
    deviation = np.std(np.subtract(surprise, entropy)) / len(surprise) ** 0.5
    assert abs(np.mean(surprise) - np.mean(entropy)) < 4 * deviation


@pytest.mark.e2e
def test_another_texts_state_is_not_used(store, uninterrupted, interrupted, tmp_path):
    """Nor a damaged one: the run starts again and ends with the bytes of its own text."""
    other = tmp_path / "other.txt"
    other.write_text("one two three " * 3000)
    at, done = interrupted
    at.add(1)
    with pytest.raises(KeyboardInterrupt):
        calibrate(StoreModel.open(store), CalibrationRequest(other, TOKENS))
    measure(store)
    assert (store / CALIBRATION_NAME).read_bytes() == uninterrupted
    at.add(len(done) + 1)
    with pytest.raises(KeyboardInterrupt):
        measure(store)
    flip(store / UNFINISHED_NAME, (store / UNFINISHED_NAME).stat().st_size // 2)
    measure(store)
    assert (store / CALIBRATION_NAME).read_bytes() == uninterrupted


@pytest.mark.e2e
@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.folders)])
def test_killed_at_random_moments(store, uninterrupted, kills):
    """After SIGKILL every later run is served, and the last one leaves the uninterrupted run's bytes."""
    command = ("-c", CALIBRATE, store)
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    chance = random.Random(5)
    for _ in range(kills):
        child = ForkedPython(*command, env=environment, stderr=subprocess.PIPE, text=True)
        assert child.stderr
        assert child.stderr.readline().startswith("writing a text")  # after the imports
        time.sleep(chance.uniform(0, 0.5))
        child.kill()
        child.communicate()
    measure(store)
    assert (store / CALIBRATION_NAME).read_bytes() == uninterrupted
    assert sorted(path.name for path in store.glob("calibration*")) == [CALIBRATION_NAME]


@pytest.mark.parametrize(
    ("text", "what"),
    [(None, "no such file"), (b"\xff\xfe", "not UTF-8"), (b"a few words", f"at least {WINDOW} tokens from")],
)
def test_unusable_texts_are_refused(store, tmp_path, text, what):
    path = tmp_path / "a.txt"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(UserError, match=what):
        calibrate(StoreModel.open(store), CalibrationRequest(path, TOKENS))


def test_windows_span_the_text(tmp_path):
    """The first begins with it, the last ends with it, and all are of one length."""
    path = tmp_path / "a.txt"
    path.write_text("0123456789" * 10)

    def tokenizer(text, verbose):
        return {"input_ids": [*map(int, text)]}

    windows = spread_windows(tokenizer, path, 35, 10)
    assert [window[0] for window in windows] == [0, 5, 0]
    assert windows[-1][-1] == 9
    assert {len(window) for window in windows} == {10}


# The command, and stores without a calibration or with an unusable one.


@pytest.mark.e2e
def test_command_writes_a_calibration(run, store):
    code, out, err = run("calibrate", store, "--tokens", 512, "--json")
    assert code == 0
    found = json.loads(out)
    assert found["measured_on"] == "512 tokens that the model wrote"
    assert found["bytes"] == (store / CALIBRATION_NAME).stat().st_size
    assert f"writing a text with {store.name}" in err
    assert f"calibrating {store.name}" in err
    code, out, _ = run("inspect", store, "--json")
    assert json.loads(out)["calibration"] == "512 tokens that the model wrote"


@pytest.mark.e2e
def test_random_tokens_are_one_step(store, open_engine):
    """Where a step has fewer rows than are measured otherwise, they are as few, and the next engine measures anew."""
    engine = open_engine(store, levels=(8, 4, 2, 0), bits=3.0, exact=True, prefill_rows=32)
    assert engine.rules.damage is not None
    assert engine.rules.damage.origin == "32 random tokens"
    assert not (store / CALIBRATION_NAME).exists()


@pytest.mark.e2e
def test_a_store_without_one_is_measured_on_random_tokens(store, open_engine, caplog):
    """The first engine whose levels go by damage says so and writes the file; the next one reads it."""
    first = open_engine(store, levels=(8, 4, 2, 0), bits=3.0, exact=True)
    (message,) = caplog.messages
    assert message.startswith(f"{store} has no usable calibration")
    assert Calibration.read(store).origin == RANDOM
    assert first.rules.damage is not None
    assert first.rules.damage.origin == "64 random tokens"
    assert first.vram.resident() == {}
    raw = (store / CALIBRATION_NAME).read_bytes()
    second = open_engine(store, levels=(4, 2, 0), bits=3.0, exact=True)
    assert second.rules.damage is not None
    assert torch.equal(second.rules.damage.table, first.rules.damage.table)
    assert len(caplog.messages) == 1
    assert (store / CALIBRATION_NAME).read_bytes() == raw


def test_a_lower_reference_is_not_kept(store, open_engine):
    """An engine with blocks up to level 4 measures against level 4, for itself alone."""
    engine = open_engine(store, levels=(4, 2, 0), bits=3.0)
    assert engine.rules.damage is not None
    assert engine.rules.damage.table[..., 1].max() == 0
    assert not (store / CALIBRATION_NAME).exists()


@pytest.mark.e2e
def test_a_later_change_needs_a_calibration(store, open_engine):
    """Where a sequence has the memory, a change to damage is refused with what to do; with a calibration it works."""
    engine = open_engine(store, levels=(8,), exact=False)
    sequence = engine.sequences.new()
    wanted = engine.settings.with_(levels=(8, 4, 2, 0), bits=3.0)
    with pytest.raises(UserError, match="run `edgemoe calibrate` on it"):
        engine.configure(wanted)
    assert engine.settings.levels == (8,)
    measure(store)
    engine.configure(wanted)
    engine.prefill(sequence, [5, 6, 7])
    assert set(engine.take_use().scheduled) - {8}


@pytest.mark.e2e
def test_a_damaged_one_is_a_warning(store, run, caplog):
    """The warning names the file, which is neither used nor changed; the answer is as from a store without one."""
    arguments = ("--vram-limit", "30MB", "--bits", "3", "--max-new-tokens", "4", "--prompt", "the fox")
    _, want, _ = run("chat", "--model", store, *arguments)
    assert Calibration.read(store).origin == RANDOM
    measure(store)
    flip(store / CALIBRATION_NAME, 2000)
    raw = (store / CALIBRATION_NAME).read_bytes()
    code, got, _ = run("chat", "--model", store, *arguments)
    assert (code, got) == (0, want)
    assert f"{store / CALIBRATION_NAME} is not used: " in caplog.text
    _, _, memory = run("chat", "--model", store, *arguments[:4], stdin="/mem\n")
    assert re.search("damage +measured on 512 random tokens", memory)
    assert (store / CALIBRATION_NAME).read_bytes() == raw
    caplog.clear()
    code, _, _ = run("verify", store)
    assert code == 0
    assert f"{store / CALIBRATION_NAME} is not used: " in caplog.text


@pytest.mark.e2e
def test_a_checkpoints_calibration_goes_with_it(store, checkpoint, tmp_path):
    """A conversion copies it into the store, where it is used as it is; another model's is left."""
    measure(store)
    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
    shutil.copy(store / CALIBRATION_NAME, source)
    convert_checkpoint(source, tmp_path / "made", max_level=8, layout="auto", dense_bits=16)
    assert (tmp_path / "made" / CALIBRATION_NAME).read_bytes() == (store / CALIBRATION_NAME).read_bytes()
    flip(source / "config.json", 20)
    with suppress(EdgemoeError):
        convert_checkpoint(source, tmp_path / "other", max_level=8, layout="auto", dense_bits=16)
    assert not (tmp_path / "other" / CALIBRATION_NAME).exists()


@pytest.mark.e2e
def test_removal_takes_it_along(store, monkeypatch, tmp_path):
    """`edgemoe rm` removes a store with its calibration."""
    monkeypatch.setattr(cache, "user_cache", lambda: tmp_path / "cache")
    cached = cache.stores_directory() / "mine"
    cached.parent.mkdir(parents=True)
    measure(store)
    shutil.copytree(store, cached)
    cache.remove(cache.find_cached("mine"))
    assert list(cache.stores_directory().iterdir()) == []


def test_the_demo_ships_calibrated():
    """Its calibration was made for the shipped checkpoint, on a text, and is small."""
    source = Checkpoint.open(DEMO)
    found = load_calibration(DEMO, source.fingerprint(), 8, list(range(6)), 32)
    assert found is not None
    assert (found.origin, found.tokens) == (WRITTEN, 2048)
    assert (DEMO / CALIBRATION_NAME).stat().st_size < 300_000


@pytest.mark.e2e
def test_eval_measures_bits(run, store, checkpoint, foxes_text):
    """`--bits` replaces the retention of four levels alone; the report names what damage was measured on."""
    measure(store)
    options = ("--text", foxes_text, "--reference", checkpoint, "--tokens", 256, "--window", 64, "--json")
    levels = ("--levels", "4", "--levels", "4/2", "--levels", "8/4/2/0")
    code, out, _ = run("eval", "--model", store, *options, *levels, "--retention", "0.75", "--bits", "3")
    assert code == 0
    report = json.loads(out)
    assert report["environment"]["damage"] == "256 tokens that the model wrote"
    rows = {(row["setting"], row["phase"]): row for row in report["rows"]}
    four, two = rows["8/4/2/0 3 bits", "decode"], rows["4/2 r 0.75", "decode"]
    assert (four["bits"], four["retention"], two["bits"], two["retention"]) == (3.0, None, None, 0.75)
    assert four["bits_per_weight_read"] == pytest.approx(3, rel=0.1)
