"""The announcement before a big checkpoint is converted."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf_files import write_model
from safetensors.torch import load_file
from small_tokenizer import a_tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from edgemoe.console.sizes import parse_size
from edgemoe.errors import UserError
from edgemoe.models.cache import store_path
from edgemoe.models.conversion import calibration_time, first_use
from edgemoe.models.conversion import run as stores
from edgemoe.models.resolve import resolve_store
from edgemoe.speed.disk import DiskSpeed
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.store.manifest import MANIFEST_NAME, MARKER_NAME, Manifest


@pytest.fixture
def small_is_big(monkeypatch, tmp_path):
    """Makes every checkpoint big, with an empty cache."""
    monkeypatch.setattr(first_use, "BIG_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.e2e
def test_the_first_use_is_announced_and_the_second_is_not(small_is_big, run, checkpoint, tmp_path):
    """Two lines precede the conversion: sizes, place and disk, then the duration."""
    words = ("chat", "--model", checkpoint, "-p", "x", "-n", 1, "--json")
    code, _, err = run(*words)
    first, second, *rest = err.splitlines()
    assert code == 0
    assert "tiny is used for the first time: its 387 KB of weights" in first
    assert f"in {tmp_path / 'cache' / 'edgemoe' / 'stores'} (" in first
    assert re.fullmatch(
        r"this takes about 0 min \(.*[KMG]B/s\); if interrupted, the next use resumes it", second
    )
    announced = re.search(r"into a store of (\S+ KB) in", first)
    made = [path.read_bytes() for path in tmp_path.rglob("*.safetensors")]
    weights = sum(len(raw) - 8 - int.from_bytes(raw[:8], "little") for raw in made)
    assert announced
    assert parse_size(announced[1]) == pytest.approx(weights, rel=0.01)
    assert any("converting" in line for line in rest)
    code, _, err = run(*words)
    assert (code, err) == (0, "")


def test_a_plan_of_a_checkpoint_converts_nothing(small_is_big, run, checkpoint, tmp_path):
    """`plan` reads headers: its numbers are the converted store's, and nothing is written or announced."""
    limits = ("-c", 64, "--vram-limit", "900KB", "--levels", "4/2", "--json")
    code, out, err = run("plan", "-m", checkpoint, *limits)
    assert (code, err) == (0, "")
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []
    assert run("convert", checkpoint, tmp_path / "store")[0] == 0
    assert json.loads(out) == json.loads(run("plan", "-m", tmp_path / "store", *limits)[1])


@pytest.mark.e2e
def test_a_limit_too_small_is_refused_before_a_conversion(small_is_big, run, checkpoint, tmp_path):
    """chat reads headers, names the smallest limit, and converts nothing."""
    code, _, err = run("chat", "-m", checkpoint, "-p", "x", "--vram-limit", "1KB")
    assert (code, err.startswith("edgemoe: expected --vram-limit ")) == (3, True)
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []


@pytest.mark.e2e
@pytest.mark.parametrize(
    "command",
    [
        ("bench", "--vram-limit", "1KB", "--prompt-tokens", 4, "--new-tokens", 2),
        ("bench", "--ablation", "ours", "--vram-limit", "1KB"),
        ("eval", "--tasks", "--vram-limit", "1KB"),
    ],
)
def test_a_measurement_is_refused_before_a_conversion(small_is_big, run, checkpoint, tmp_path, command):
    """bench and eval divide their limits by headers too."""
    code, out, err = run(*command, "--model", checkpoint)
    assert (code, out, err.startswith("edgemoe: expected --vram-limit ")) == (3, "", True)
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []


@pytest.mark.e2e
@pytest.mark.parametrize("command", [("chat", "-p", "x", "-m"), ("pull",)])
def test_a_wrong_template_is_refused_before_a_conversion(run, checkpoint, tmp_path, command):
    """A template that cannot be rendered is found by a small conversation, and nothing is converted."""
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    (copy / "chat_template.jinja").write_text("{{ raise_exception('only odd numbers of turns') }}")
    code, _, err = run(*command, copy)
    assert (code, "only odd numbers of turns" in err, err.count("\n")) == (2, True, 1)
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []


@pytest.mark.e2e
def test_another_layout_is_another_conversion(small_is_big, capsys, checkpoint):
    """A store in one layout does not serve another; the second conversion is announced too."""
    made = []
    for layout in ("cpu-generic", "cuda"):
        made.append(resolve_store(checkpoint, layout))
        assert "tiny is used for the first time" in capsys.readouterr().err
        assert resolve_store(checkpoint, layout) == made[-1]
        assert capsys.readouterr().err == ""
    assert made[0] != made[1]


@pytest.mark.e2e
@pytest.mark.parametrize("command", [["eval", "--tasks", "--task-count", "1"], ["bench"]])
def test_every_command_announces_what_it_converts(
    small_is_big, run, monkeypatch, capsys, checkpoint, command
):
    """eval and bench print the announcement before the first weight is read."""

    class Converts(Exception):
        pass

    def convert(*args: object, **options: object) -> None:
        raise Converts

    monkeypatch.setattr(stores, "convert", convert)
    with pytest.raises(Converts):
        run(*command, "--model", checkpoint)
    assert "tiny is used for the first time" in capsys.readouterr().err


def test_a_small_checkpoint_is_not_announced(monkeypatch, capsys, checkpoint, tiny_store, tmp_path):
    """A store of any size is not announced either."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    resolve_store(checkpoint)
    monkeypatch.setattr(first_use, "BIG_BYTES", 1)
    assert resolve_store(tiny_store) == tiny_store
    assert "first time" not in capsys.readouterr().err


@pytest.mark.e2e
def test_a_gguf_file_is_announced_too(small_is_big, capsys, tmp_path):
    """A GGUF file without config.json is announced like any checkpoint."""
    path = tmp_path / "model.gguf"
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(vocab_size=300, head_dim=32, max_position_embeddings=64, **sizes, **experts)
    write_model(path, Qwen3MoeForCausalLM(config), a_tokenizer())
    resolve_store(path)
    assert "model.gguf is used for the first time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("disk", "download", "estimate"),
    [
        ((200e6, 1e9), False, "5 min (2 cores, 200 MB/s)"),
        ((1e9, 100e6), False, "10 min (the disk reads 100 MB/s)"),
        ((50e6, 1e9), False, "10 min (the disk writes 50 MB/s)"),
        ((200e6, 1e9), True, "19 min (a download at 50 MB/s, which is assumed)"),
        (None, False, "5 min (2 cores, 200 MB/s)"),
    ],
)
def test_the_announced_figures(monkeypatch, capsys, checkpoint, tmp_path, disk, download, estimate):
    """57 GB of weights: the free disk of a directory that does not exist yet, and the duration of the slowest part."""

    def measured(directory: Path, size: int) -> DiskSpeed:
        if disk is None:
            raise PermissionError(13, "Permission denied")
        return DiskSpeed(*disk, direct=True)

    monkeypatch.setattr(first_use, "measure_disk", measured)
    for module in (first_use, calibration_time):
        monkeypatch.setattr(module, "cores", lambda: 2)
        monkeypatch.setattr(module, "store_bytes", lambda *args, **kwargs: 31_000_000_000)
    monkeypatch.setattr(calibration_time, "available_memory", lambda: 64_000_000_000)
    monkeypatch.setattr(calibration_time, "rates_path", lambda: tmp_path / "rates.json")
    usage = shutil.disk_usage(tmp_path)._replace(free=123_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage if path == tmp_path else None)
    opened = Checkpoint.open(checkpoint)
    monkeypatch.setattr(opened, "_weights", {"all": SimpleNamespace(nbytes=57_000_000_000)})
    layers = SimpleNamespace(weights=4_600_000)
    experts = SimpleNamespace(
        layers=range(48), count=128, geometry=lambda level: layers, has_codes=lambda level: coded
    )
    monkeypatch.setattr(calibration_time, "ExpertWeights", lambda *parts: experts)
    coded = download
    first_use.announce(opened, "big", tmp_path / "a" / "b", download=download)
    first, second, *others = capsys.readouterr().err.splitlines()
    # 6,144 experts of 4.6 million weights, of which a core codes 3.6 per second, and 10,240 tokens of 3.2 GB at
    # 12 GB/s; codes of the source are kept.
    assert [line.endswith("in about 111 min more") for line in others] == ([] if coded else [True])
    assert "57 GB of weights" in first
    assert "a store of 31 GB in" in first
    assert f"about {estimate}; " in second
    assert "(123 GB free)" in first


def test_dense_weights_have_8_bits_and_stores_that_are_there_keep_theirs(
    run, monkeypatch, checkpoint, tmp_path
):
    """`pull` makes 8 bits, or what an option says; a store of 16 bits, finished or begun, is used as it is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def pulled(*options: str) -> tuple[int, Path]:
        code, out, _ = run("pull", checkpoint, "--json", *options)
        return code, Path(json.loads(out)["store"]) if code == 0 else tmp_path

    code, store = pulled()
    stored = load_file(store / "dense.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    assert (code, Manifest.load(store).dense_bits, stored.dtype) == (0, 8, torch.int8)
    assert pulled("--dense-bits", "bf16")[0] == 2
    shutil.rmtree(store)
    assert pulled("--dense-bits", "bf16") == (0, store)
    assert Manifest.load(store).dense_bits == 16
    assert pulled() == (0, store)
    (store / MANIFEST_NAME).rename(store / MARKER_NAME)
    marked = Manifest.read(store / MARKER_NAME)
    replace(marked, layers={}, files={}, source_format="", source_error=None).save(store / MARKER_NAME)
    assert pulled() == (0, store)
    assert Manifest.load(store).dense_bits == 16


def test_one_of_several_layouts_of_a_model_is_chosen(run, monkeypatch, checkpoint, tmp_path):
    """A name takes the layout of this machine's kernel, then the store that was used last; two models are refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = resolve_store(checkpoint)
    layout = Manifest.load(made).layout
    other = made.with_name(made.name.replace(layout, "cuda"))
    third = made.with_name(made.name.replace(layout, "cpu-other"))
    for path, age in ((other, 30), (third, 20)):
        shutil.copytree(made, path)
        os.utime(path, times=(time.time() + age,) * 2)
    assert resolve_store(Path("tiny")) == made
    code, out, _ = run("pull", "tiny", "--json")
    assert (code, json.loads(out)["store"]) == (0, str(made))
    assert store_path(Path("tiny")) == other
    shutil.rmtree(made)
    assert resolve_store(Path("tiny")) == other
    third.rename(third.with_name("tiny-0123456789abcdef-cuda"))
    with pytest.raises(UserError, match="2 of them"):
        resolve_store(Path("tiny"))
