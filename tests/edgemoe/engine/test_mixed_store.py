"""Stores of mixed sources: each matrix has its own bits, and plan, levels and kernels keep within them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from gguf_files import Kind, blocks, write_model
from small_tokenizer import a_tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from edgemoe.calibrate.run import CalibrationRequest, calibrate
from edgemoe.families.table import family_of
from edgemoe.kernels.registry import kernels_for
from edgemoe.kv.step import Segment, Step
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.store_model import StoreModel
from edgemoe.policy.hotness import Hotness
from edgemoe.recode.request import RecodeRequest
from edgemoe.recode.run import recode
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.expert_weights import ExpertWeights
from edgemoe.storage.export.matrices import StoreExperts
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.verify import verify

pytestmark = pytest.mark.e2e

LAYERS, EXPERTS, HIDDEN, INNER = 4, 6, 256, 256
TYPES = {
    "gate": (Kind.Q4_K,) * 4,
    "up": (Kind.Q4_K,) * 4,
    "down": (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q8_0),
}
NEW = (11, 250, 42)
PROMPT = torch.randint(3, 300, (21,), generator=torch.Generator().manual_seed(2)).tolist()


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> tuple[Path, Qwen3MoeForCausalLM]:
    """A store of a GGUF file whose down has another type in each layer, and the file's own values in transformers."""
    directory = tmp_path_factory.mktemp("mixed")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=300,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=INNER,
        norm_topk_prob=True,
        max_position_embeddings=512,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    values = {}

    def experts(name: str, weight: torch.Tensor):
        _, layer, tensor, _ = name.split(".")
        part = tensor.split("_")[1]
        kind = TYPES[part][int(layer)]
        raw = blocks(kind, tuple(weight.shape), sum(name.encode()))
        values[int(layer), part] = torch.from_numpy(gguf.quants.dequantize(raw, kind))
        return raw, kind

    write_model(directory / "mixed.gguf", model, a_tokenizer(), experts=experts)
    for layer, block in enumerate(model.model.layers):
        gate_up = torch.cat((values[layer, "gate"], values[layer, "up"]), 1)
        block.mlp.experts.gate_up_proj.data.copy_(gate_up)
        block.mlp.experts.down_proj.data.copy_(values[layer, "down"])
    options = {"max_level": None, "layout": "auto", "dense_bits": 16}
    convert_checkpoint(directory / "mixed.gguf", directory / "store", **options)
    return directory / "store", model


def answer(engine, sequence=None) -> torch.Tensor:
    """Logits of a prompt's last token and of a few new tokens."""
    sequence = sequence or engine.sequences.new()
    sequence.crop(0)
    rows = [engine.prefill(sequence, PROMPT)]
    rows += [engine.step(Step((Segment(sequence, (token,)),)))[0] for token in NEW]
    return torch.stack(rows)


@pytest.fixture(scope="module")
def expected(mixed) -> torch.Tensor:
    """The logits by transformers, with the values that the gguf package reads from the file."""
    with torch.inference_mode():
        return mixed[1](torch.tensor([[*PROMPT, *NEW]])).logits[0, len(PROMPT) - 1 :]


@pytest.mark.parametrize("kernel", kernels_for("cpu"), ids=lambda kernel: kernel.name)
def test_level_8_is_the_files_own_function(mixed, expected, open_engine, monkeypatch, kernel):
    """Logits are near the file's function, by either kernel; another layout than the store's is changed."""
    monkeypatch.setattr("edgemoe.models.store_model.compute", lambda device="cpu": kernel)
    got = answer(open_engine(mixed[0]))
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_limits_do_not_change_a_bit(mixed, open_engine):
    """Experts come at the highest level of their layer, whatever is resident; bytes read are the records'."""
    engine = open_engine(mixed[0])
    want, counts = answer(engine), engine.take_counts()
    geometry = StoreModel.open(mixed[0]).manifest.geometry
    assert counts.levels.keys() == {8, 4}
    resident = engine.vram.resident()
    assert {level for key, level in resident.items() if key.layer == 0} == {4}
    assert {level for key, level in resident.items() if key.layer} == {8}
    sizes = [geometry.of_layer(key.layer).record_bytes for key in resident]
    assert counts.ssd_bytes == sum(sizes)
    for experts, dram in ((2, 0), (5, 3)):
        small = open_engine(mixed[0], experts=experts, dram_experts=dram)
        assert torch.equal(answer(small), want)


def test_a_layer_has_levels_up_to_its_own(mixed, open_engine):
    """Where levels are mixed, the layer of 4 bits has none above 4, and hotness makes no expert of it hot."""
    engine = open_engine(mixed[0], levels=(8, 4), retention=0.5, exact=False)
    answer(engine)
    highest = {key.layer: 0 for key in engine.vram.resident()}
    for key, level in engine.vram.resident().items():
        highest[key.layer] = max(highest[key.layer], level)
    assert highest == {0: 4, 1: 8, 2: 8, 3: 8}
    hot = open_engine(
        mixed[0], levels=(8, 4), exact=False, hotness=Hotness(warmup=1, interval=2, settled=True)
    )
    sequence = hot.sequences.new()
    for _ in range(3):
        answer(hot, sequence)
    found = hot.vram.resident()
    assert {level for key, level in found.items() if key.layer == 0} == {4}
    assert 8 in found.values()
    hot.configure(hot.settings.with_(levels=(8, 2)))
    for _ in range(3):
        answer(hot, sequence)
    assert max(level for key, level in hot.vram.resident().items() if key.layer == 0) == 4


def test_the_plan_counts_the_planes_that_layers_have(mixed):
    """Without a limit everything is resident in the bytes of its planes in memory: one layer in four has no d8."""
    store = StoreModel.open(mixed[0])
    plan = store.plan(vram_limit=None, context=64)
    assert plan.experts_resident["8"] == LAYERS * EXPERTS
    assert store.record_bytes == store.manifest.expert_bytes
    low = store.manifest.geometry.low_bytes
    every = LAYERS * EXPERTS * store.form.bytes_at(8) - EXPERTS * low
    assert store.expert_bytes == every
    assert plan.vram_blocks == {
        "base": LAYERS * EXPERTS,
        "d4": LAYERS * EXPERTS,
        "d8": (LAYERS - 1) * EXPERTS,
    }


def test_the_store_is_whole_and_described(mixed, run):
    """verify reads every byte; inspect has a row for each matrix of layers with the same bits."""
    assert not verify(mixed[0], lambda done, total: None).damage
    _, out, _ = run("inspect", mixed[0], "--json")
    rows = json.loads(out)["codes_by_layer"]
    assert [(row["layers"], row["matrix"], row["bits"]) for row in rows[:4]] == [
        ([0], "gate_up", 4),
        ([0], "down", 4),
        ([1], "gate_up", 4),
        ([1], "down", 5),
    ]
    _, out, _ = run("inspect", mixed[0])
    assert "| 3      | down    | 8" in out


def relative_errors(store: Path, model) -> list[tuple[float, float]]:
    """Largest relative error of gate and up, and of down, in each layer at level 8, against the file's values."""
    out = []
    with torch.inference_mode(), StoreExperts(store, Manifest.load(store)) as experts:
        for layer, block in enumerate(model.model.layers):
            values, found = block.mlp.experts, []
            for expert in range(EXPERTS):
                gate, up, down = (matrix.weights() for matrix in experts.read(layer, expert, 8))
                pairs = (
                    (torch.cat((gate, up)), values.gate_up_proj[expert]),
                    (down, values.down_proj[expert]),
                )
                found.append([float((got - want).norm() / want.norm()) for got, want in pairs])
            out.append(tuple(max(each) for each in zip(*found, strict=True)))
    return out


def test_an_export_has_the_values_of_the_store(mixed, run, tmp_path):
    """At level 8: every expert within the rounding of 8-bit integers, whatever its bits are."""
    code, _, err = run("export", mixed[0], tmp_path / "out", "--format", "gguf")
    assert code == 0, err
    checkpoint = Checkpoint.open(tmp_path / "out")
    experts = ExpertWeights(checkpoint, family_of(checkpoint.config))
    with StoreExperts(mixed[0], Manifest.load(mixed[0])) as stored:
        for layer in range(LAYERS):
            want = [part.weights() for part in stored.read(layer, 1, 8)]
            found = [matrix.weights() for matrix in experts.read(layer, 1)]
            for got, values in zip(found, (torch.cat(want[:2]), want[2]), strict=True):
                assert (got - values).norm() < 0.01 * values.norm()


def test_other_codes_and_calibration_keep_within_the_bits(mixed, foxes_text, tmp_path):
    """Kept codes stay to the bit, Q6_K's 6 bits are chosen anew, and level 8 of the layer of 4 bits is its level 4."""
    store = Path(shutil.copytree(mixed[0], tmp_path / "store"))
    before, errors = Manifest.load(store), relative_errors(store, mixed[1])
    assert max(max(each) for i, each in enumerate(errors) if i != 2) < 0.003
    assert errors[2][0] < 0.003 < errors[2][1] < 0.03
    after = recode(
        StoreModel.open(store), mixed[0].parent / "mixed.gguf", RecodeRequest(foxes_text, 512, "high")
    )
    for layer in range(LAYERS):
        pairs = zip(before.layers[layer].records, after.layers[layer].records, strict=True)
        same = {old.checksums == new.checksums for old, new in pairs}
        assert same == {layer != 2}
    again = relative_errors(store, mixed[1])
    assert errors[2][1] < again[2][1] < 3 * errors[2][1]
    assert not verify(store, lambda done, total: None).damage
    made = calibrate(StoreModel.open(store), CalibrationRequest(foxes_text, 512))
    assert not made.error[0, :, 1].any()
    assert made.error[1:, :, 1].any(1).all()
