"""tools.synthetic.family_store: stores of several families that load, and the bits of their tensors."""

from __future__ import annotations

import pytest
import torch

from edgemoe.bench.synthetic import workload
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.kv.step import Segment, Step
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.files.header import read_header
from edgemoe.storage.store.manifest import SCALE_SUFFIX
from tools.synthetic import family_sizes, family_store

pytestmark = pytest.mark.e2e

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
OF_FAMILIES = {
    "glm-4.5-air": {"moe_intermediate_size": 64, "intermediate_size": 96},
    "gpt-oss-20b": {"intermediate_size": 64, "num_experts_per_tok": 2},
    "qwen3.6-35b-a3b": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    | {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.folders if name == "glm-4.5-air" else ()) for name in OF_FAMILIES],
)
def test_a_store_answers(name, tmp_path, monkeypatch):
    """A new token after a prompt has finite logits; matrices have 8 bits, routers 16."""
    monkeypatch.setattr(workload, "POOL", 1 << 13)
    model_type, sizes = family_sizes.MODELS[name]
    monkeypatch.setitem(family_sizes.MODELS, name, (model_type, sizes | SMALL | OF_FAMILIES[name]))
    how = ["--layers", "4", "--experts", "12", "--vocab", "400", "--layout", "cpu-generic"]
    assert family_store.main([name, *how, str(tmp_path / "store")]) == 0
    opened = StoreModel.open(tmp_path / "store")
    settings = RunSettings(levels=(4,), exact=True)
    with Engine(opened, opened.plan(vram_limit=None, settings=settings, context=16), settings) as engine:
        sequence = engine.sequences.new()
        engine.prefill(sequence, [5, 6, 7])
        assert bool(torch.isfinite(engine.step(Step((Segment(sequence, (9,)),)))).all())
    dense = read_header(tmp_path / "store" / "dense.safetensors").tensors
    coded = {key for key, entry in dense.items() if entry.dtype == "I8"}
    assert "model.embed_tokens.weight" in coded
    assert not any("router" in key or key.endswith("mlp.gate.weight") for key in coded)
    assert {key + SCALE_SUFFIX for key in coded} <= dense.keys()


def test_a_finished_store_stays(tmp_path, monkeypatch):
    """A second run with the same arguments changes no file, and every second layer repeats the experts of the first."""
    monkeypatch.setattr(workload, "POOL", 1 << 13)
    model_type, sizes = family_sizes.MODELS["qwen3-30b-a3b"]
    small = sizes | SMALL | {"moe_intermediate_size": 64}
    monkeypatch.setitem(family_sizes.MODELS, "qwen3-30b-a3b", (model_type, small))
    how = ["qwen3-30b-a3b", "--layers", "3", "--experts", "8", "--vocab", "400", str(tmp_path / "store")]
    how += ["--distinct", "2"]
    family_store.main(how)
    layers = [
        (tmp_path / "store" / f"experts-0000{layer}.safetensors").read_bytes()[-4096:] for layer in range(3)
    ]
    assert layers[0] == layers[2] != layers[1]
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()}
    family_store.main(how)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()} == before
