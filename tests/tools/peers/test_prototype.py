"""tools/peers/prototype.py: a baseline is worth something only if it computes the same model."""

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

from storage.encode import decode
from storage.layout import LAYOUTS
from storage.manifest import Manifest


@pytest.fixture
def prototype(monkeypatch: pytest.MonkeyPatch) -> Any:
    from tools.peers import prototype

    return prototype


@pytest.fixture
def make(prototype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Synthesizes a tiny store of so many layers, and its flat form beside it."""
    from tools.synthetic import store as synthesize

    def make(layers: int) -> Path:
        assert synthesize.main(["--like", "tiny", "--layers", str(layers), str(tmp_path / "store")]) == 0
        assert prototype.main(["prepare", str(tmp_path / "store"), str(tmp_path / "flat")]) == 0
        return tmp_path / "store"

    monkeypatch.setattr("tools.synthetic.workload.POOL", 1 << 13)
    return make


def reference(store: Path) -> Any:
    """transformers' own model in float32, with every expert decoded at level 4."""
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


@torch.inference_mode()
def test_it_computes_the_model(prototype: Any, make: Callable[[int], Path]) -> None:
    """Logits are those of the float32 reference, but for bf16's rounding."""
    store = make(3)
    model, _ = prototype.load(store.parent / "flat", 1 << 20)
    ids = torch.randint(320, (1, 24), generator=torch.Generator().manual_seed(0))
    found, expected = model(input_ids=ids).logits.float(), reference(store)(input_ids=ids).logits
    # Where bf16 tips a router's choice a token takes another way: such a token may differ by more.
    assert torch.nn.functional.cosine_similarity(found, expected, dim=-1).median() > 0.999


@torch.inference_mode()
def test_a_deep_workload_stays_finite(prototype: Any, make: Callable[[int], Path]) -> None:
    """Through 48 layers of random weights the logits are finite and tell tokens apart."""
    model, _ = prototype.load(make(48).parent / "flat", 1 << 21)
    logits = model(input_ids=torch.arange(24).unsqueeze(0)).logits.float()
    assert torch.isfinite(logits).all()
    assert len(set(logits.argmax(-1).flatten().tolist())) > 12


def test_a_small_cache_changes_hits_but_not_the_answer(prototype: Any, make: Callable[[int], Path]) -> None:
    """With room for a fraction of the experts it reads more and says the same."""
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


def test_the_command_line(
    prototype: Any, make: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """One JSON object a prompt, the first cold; too little memory for experts exits 2 naming the least."""
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
        assert prototype.main(["prepare", str(store), flat]) == 2, "an existing directory is left alone"
        assert prototype.main(["run", str(store), "--expert-ram", "1000000"]) == 2, "a store is no flat form"
    finally:
        torch.set_num_threads(threads)
