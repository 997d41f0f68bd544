"""What is said before a big checkpoint is converted."""

from __future__ import annotations

import re
import shutil
import sys

import pytest
from conftest import a_tokenizer
from gguf_files import write_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from edgemoe import first_use
from edgemoe.cli import main
from edgemoe.sizes import parse_size
from storage.checkpoint import Checkpoint


@pytest.fixture
def small_is_big(monkeypatch, tmp_path):
    """Every checkpoint is big, and the cache is empty."""
    monkeypatch.setattr(first_use, "BIG_BYTES", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_first_use_is_announced_and_the_second_is_not(
    small_is_big, monkeypatch, capsys, checkpoint, tmp_path
):
    """Before the conversion's own lines: what, where, how much disk, how long."""
    monkeypatch.setattr(sys, "argv", ["edgemoe", "plan", "--model", str(checkpoint)])
    assert main() == 0
    said, time, *rest = capsys.readouterr().err.splitlines()
    assert "tiny is used for the first time: its 387 KB of weights" in said
    assert f"in {tmp_path / 'cache' / 'edgemoe' / 'stores'} (" in said
    assert "about 0 min (assumed: 200 MB/s)" in time
    announced = re.search(r"into a store of (\S+ KB) in", said)
    made = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    headers = 2 * 4096 + 8192
    assert announced
    assert made - headers < parse_size(announced[1]) <= made
    assert any("converting" in line for line in rest)
    assert main() == 0
    assert capsys.readouterr().err == ""


def test_what_is_small_or_converted_already_needs_no_words(monkeypatch, checkpoint, tiny_store, tmp_path):
    """Nor does what is no checkpoint at all: whoever opens it says so."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert first_use.conversion_ahead(checkpoint) is None
    monkeypatch.setattr(first_use, "BIG_BYTES", 1)
    assert first_use.conversion_ahead(tiny_store) is None
    assert first_use.conversion_ahead(tmp_path) is None


def test_a_gguf_file_is_announced_too(small_is_big, tmp_path):
    """It has no config.json beside it, and may be as big as any other checkpoint."""
    path = tmp_path / "model.gguf"
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(vocab_size=300, head_dim=32, max_position_embeddings=64, **sizes, **experts)
    write_model(path, Qwen3MoeForCausalLM(config), a_tokenizer())
    said, _ = first_use.conversion_ahead(path) or ("", "")
    assert "model.gguf is used for the first time" in said


@pytest.mark.parametrize(("rate", "minutes"), [(200_000_000, "5 min"), (50_000_000, "19 min")])
def test_the_figures(monkeypatch, checkpoint, tmp_path, rate, minutes):
    """57 GB: the free disk of a directory still to be made, and the time at a rate."""
    usage = shutil.disk_usage(tmp_path)._replace(free=123_000_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage if path == tmp_path else None)
    opened = Checkpoint.open(checkpoint)
    monkeypatch.setattr(opened, "names", lambda: ["all"])
    monkeypatch.setattr(opened, "nbytes", lambda name: 57_000_000_000)
    monkeypatch.setattr(first_use, "store_bytes", lambda *args, **kwargs: 31_000_000_000)
    first, second = first_use.announcement(opened, "big", tmp_path / "a" / "b", rate)
    assert "57 GB of weights" in first
    assert "a store of 31 GB in" in first
    assert f"{minutes} " in second
    assert "(123 GB free)" in first
