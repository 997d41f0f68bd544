"""tools/peers/prototype.py: the baseline computes the same model as transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.manifest import Manifest
from tools.peers import prototype
from tools.synthetic import store as synthetic_store


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Synthesizes a tiny store with a number of layers, and writes its flat form beside it."""

    def make(layers: int) -> Path:
        assert synthetic_store.main(["--like", "tiny", "--layers", str(layers), str(tmp_path / "store")]) == 0
        assert prototype.main(["prepare", str(tmp_path / "store"), str(tmp_path / "flat")]) == 0
        return tmp_path / "store"

    monkeypatch.setattr("tools.synthetic.workload.POOL", 1 << 13)
    return make


def reference(store: Path) -> Any:
    """transformers' model in float32, with every expert decoded at level 4."""
    manifest = Manifest.load(store)
    weights = load_file(store / "dense.safetensors")
    for layer, entry in manifest.layers.items():
        raw = np.fromfile(store / entry.file, np.uint8)
        experts = [
            decode(raw[r.offset : r.offset + manifest.geometry.record_bytes], manifest.geometry,
                   LAYOUTS[manifest.layout], 4)
            for r in entry.records
        ]  # fmt: skip
        prefix = f"model.layers.{layer}.mlp.experts."
        weights[prefix + "gate_up_proj"] = torch.stack([gate_up for gate_up, _ in experts])
        weights[prefix + "down_proj"] = torch.stack([down for _, down in experts])
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_pretrained(store)).float().eval()
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model


@pytest.mark.e2e
@torch.inference_mode()
def test_logits_equal_the_reference(make: Callable[[int], Path]) -> None:
    """Logits equal the float32 reference's up to bf16 rounding."""
    store = make(3)
    model, _ = prototype.load(store.parent / "flat", 1 << 20)
    ids = torch.randint(320, (1, 24), generator=torch.Generator().manual_seed(0))
    found, expected = model(input_ids=ids).logits.float(), reference(store)(input_ids=ids).logits
    # Where bf16 changes a router's choice, a token has other experts and may differ by more.
    assert torch.nn.functional.cosine_similarity(found, expected, dim=-1).median() > 0.999


@pytest.mark.e2e
@torch.inference_mode()
def test_logits_of_a_deep_workload_are_finite(make: Callable[[int], Path]) -> None:
    """After 48 layers of random weights the logits are finite and differ between tokens."""
    model, _ = prototype.load(make(48).parent / "flat", 1 << 21)
    logits = model(input_ids=torch.arange(24).unsqueeze(0)).logits.float()
    assert torch.isfinite(logits).all()
    assert len(set(logits.argmax(-1).flatten().tolist())) > 12


@pytest.mark.e2e
def test_small_cache_changes_hits_and_no_logits(make: Callable[[int], Path]) -> None:
    """With slots for a fraction of the experts the hit rate drops and the logits stay equal."""
    store = make(3)
    slot = prototype.slot_bytes(Manifest.load(store).geometry.matrices)
    answers = []
    for slots in (3 * 8, 9):
        model, experts = prototype.load(store.parent / "flat", slots * slot)
        ids = torch.randint(320, (1, 24), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            logits = model(input_ids=ids).logits
        answers.append(logits)
        row = prototype.answer(model, experts, ids, 6)
        assert row["expert_ram_bytes"] == slots * slot
        used = 2 * 3  # top-2 of 3 layers
        assert row["ssd_bytes_per_token"] == pytest.approx((1 - row["hit_rate"]) * used * slot)
    assert torch.equal(*answers)
    assert row["hit_rate"] < 0.5


def test_command_line(make: Callable[[int], Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The tool prints a JSON object a prompt, the first cold; too few bytes for experts exit 2 with the minimum."""
    store = make(2)
    capsys.readouterr()
    flat, threads = str(store.parent / "flat"), torch.get_num_threads()
    slot = prototype.slot_bytes(Manifest.load(store).geometry.matrices)
    short = ["--prompt-tokens", "4", "--new-tokens", "4", "--runs", "2", "--json"]
    try:
        assert prototype.main(["run", flat, "--expert-ram", str(400 * slot), *short]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(row["arm"], row["prompt_tokens"], row["new_tokens"]) for row in rows] == [
            ("cold", 4, 4),
            ("warm", 4, 4),
        ]
        assert all(row["ttft_s"] > 0 and row["tpot_s"]["p99"] >= row["tpot_s"]["p50"] > 0 for row in rows)
        assert prototype.main(["run", flat, "--expert-ram", str(8 * slot - 1)]) == 2
        assert str(8 * slot) in capsys.readouterr().err
        assert prototype.main(["prepare", str(store), flat]) == 2, "an existing directory is refused"
        assert prototype.main(["run", str(store), "--expert-ram", "1000000"]) == 2, "a store is refused"
    finally:
        torch.set_num_threads(threads)
