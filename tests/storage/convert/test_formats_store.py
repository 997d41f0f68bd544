"""Whole quantized models, converted and run, against transformers with the same weights."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
import typer
from family_models import load, random_model, save
from gguf_files import write_model
from safetensors.torch import load_file, save_file
from small_tokenizer import a_tokenizer

from edgemoe.cli import app
from edgemoe.errors import DamagedData, MissingTensor, ModelRefused
from edgemoe.kv.sequence import SequenceKV
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.resolve import resolve_store
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.store.contents import describe
from edgemoe.storage.store.manifest import Manifest

GROUP = 32
TOKENS = [5, 17, 90, 201, 33, 250, 4, 129]


def rounded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes float32 [N, K] to symmetric 4-bit codes [N, K] and float32 scales [N, K / 32] of 8 mantissa bits."""
    grouped = weight.float().view(weight.shape[0], -1, GROUP)
    scales = (grouped.abs().amax(-1) / 7).bfloat16().float()
    codes = (grouped / scales.unsqueeze(-1)).round().clamp(-8, 7) + 8
    return codes.view_as(weight).long(), scales


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    codes, scales = rounded(weight)
    return (codes - 8).float() * scales.repeat_interleave(GROUP, 1)


@pytest.fixture(scope="module")
def model(tiny_model):
    """The tiny model with a sharp head, whose experts' weights are 4-bit numbers times scales; in float32."""
    model = copy.deepcopy(tiny_model).float()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.copy_(torch.stack([dequantized(expert) for expert in parameter]))
    return model


def words(codes: torch.Tensor) -> torch.Tensor:
    """Packs [n, m] values 0..15 into int32 [n / 8, m]: eight of a column per word, the first in the lowest bits."""
    shifts = 4 * torch.arange(8).view(1, 8, 1)
    packed = (codes.view(-1, 8, codes.shape[1]) << shifts).sum(1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


@pytest.fixture(scope="module")
def gptq(model, tmp_path_factory) -> Path:
    """The model as a GPTQ checkpoint in the published layout, with packed experts."""
    directory = tmp_path_factory.mktemp("gptq") / "model"
    model.save_pretrained(directory)
    a_tokenizer().save_pretrained(directory)
    out = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        if ".experts." not in name:
            out[name] = weight
            continue
        stem = name.removesuffix(".weight")
        codes, scales = rounded(weight)
        out[f"{stem}.qweight"] = words(codes.T.contiguous())
        out[f"{stem}.qzeros"] = torch.full(
            (scales.shape[1], weight.shape[0] // 8), 0x77777777, dtype=torch.int32
        )
        out[f"{stem}.scales"] = scales.T.contiguous()
        out[f"{stem}.g_idx"] = (torch.arange(weight.shape[1]) // GROUP).to(torch.int32)
    save_file(out, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def converted(source: Path, destination: Path) -> Manifest:
    return convert_checkpoint(source, destination, max_level=None, layout="auto", dense_bits=16)


def divergence(engine, model) -> float:
    """Computes the largest KL of the engine's next token against transformers, over all prefixes, in nats."""
    with torch.no_grad():
        want = copy.deepcopy(model).bfloat16()(torch.tensor([TOKENS])).logits[0].double().log_softmax(-1)
    worst = 0.0
    for end in range(1, len(TOKENS) + 1):
        got = (
            engine.prefill(SequenceKV(engine.shape.kv, engine.plan.context), TOKENS[:end])
            .double()
            .log_softmax(-1)
        )
        worst = max(worst, float((want[end - 1].exp() * (want[end - 1] - got)).sum()))
    return worst


@pytest.mark.e2e
@pytest.mark.covers("GPTQ")
def test_a_gptq_model_answers_at_level_4_as_transformers_does(gptq, model, open_engine, tmp_path):
    """By default the store has level 4, the source's groups, no error (bf16 scales), and the same answers."""
    manifest = converted(gptq, tmp_path / "store")
    assert manifest.max_level == 4
    assert {matrix.group for matrix in manifest.geometry.matrices} == {GROUP}
    assert (manifest.source_format, manifest.source_error) == ("GPTQ", 0.0)
    assert divergence(open_engine(tmp_path / "store", level=4), model) < 0.001


@pytest.mark.e2e
@pytest.mark.covers("GGUF")
def test_a_gguf_model_answers_as_its_checkpoint_does(tiny_model, open_engine, tmp_path):
    """Equal weights as GGUF and as safetensors give equal logits."""
    model = copy.deepcopy(tiny_model)
    model.config.mlp_only_layers = []
    torch.manual_seed(2)
    model = type(model)(model.config).bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                # Weights that F16 and bf16 both represent: the file has experts in F16.
                parameter.copy_((parameter * 2**16).round().clamp(-127, 127) / 2**10)
    write_model(tmp_path / "model.gguf", model, a_tokenizer())
    model.save_pretrained(tmp_path / "saved")
    a_tokenizer().save_pretrained(tmp_path / "saved")
    of_file = converted(tmp_path / "model.gguf", tmp_path / "gguf")
    of_saved = converted(tmp_path / "saved", tmp_path / "store")
    assert (of_file.max_level, of_file.source_format) == (8, "GGUF")
    assert 0 < of_file.source_error == of_saved.source_error < 0.01
    logits = []
    for store in ("gguf", "store"):
        engine = open_engine(tmp_path / store)
        logits.append(engine.prefill(SequenceKV(engine.shape.kv, engine.plan.context), TOKENS))
    assert torch.equal(*logits)
    assert float(logits[0].std()) > 0


def test_parameters_that_are_not_finite_are_damage(gptq, tmp_path):
    """A NaN scale is reported with layer, expert and matrix, and no store is written."""
    directory = Path(shutil.copytree(gptq, tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.2.mlp.experts.3.down_proj.scales"][0, 5] = float("nan")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(DamagedData, match="layer 2, expert 3, matrix down"):
        converted(directory, tmp_path / "store")
    assert not (tmp_path / "store" / "store.json").exists()


def test_a_missing_part_of_an_expert_is_fatal(gptq, tmp_path):
    """A missing packed tensor of an expert is reported by name, and no file is written."""
    directory = Path(shutil.copytree(gptq, tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.down_proj.qweight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(MissingTensor, match=r"layers\.2\.mlp\.experts\.3\.down_proj"):
        converted(directory, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_level_8_of_four_bits_is_refused(gptq, tmp_path):
    """Level 8 of 4-bit codes is refused, and no file is written."""
    with pytest.raises(ModelRefused, match="max-level"):
        convert_checkpoint(gptq, tmp_path / "store", max_level=8, layout="auto", dense_bits=16)
    assert not (tmp_path / "store").exists()


def test_the_error_is_the_stores_own(checkpoint, tiny_store, tiny_model):
    """store.json and inspect contain the relative error of the highest level, over experts 0 and 4 of both layers."""
    manifest = Manifest.load(tiny_store)
    squared = total = 0.0
    for layer, records in manifest.layers.items():
        experts = tiny_model.model.layers[layer].mlp.experts
        raw = (tiny_store / records.file).read_bytes()
        for expert in (0, 4):
            at = records.records[expert].offset
            record = torch.frombuffer(
                bytearray(raw[at : at + manifest.geometry.record_bytes]), dtype=torch.uint8
            )
            source = experts.gate_up_proj[expert].detach(), experts.down_proj[expert].detach()
            made = decode(record.numpy(), manifest.geometry, LAYOUTS[manifest.layout], 8)
            for got, want in zip(made, source, strict=True):
                squared += float((got - want.float()).square().sum())
                total += float(want.float().square().sum())
    assert manifest.source_error == pytest.approx((squared / total) ** 0.5, rel=1e-3)
    assert describe(tiny_store)["source_error"] == manifest.source_error
    assert describe(tiny_store)["source_format"] == "safetensors"


@pytest.mark.e2e
def test_a_gguf_file_can_be_named_as_a_model(tiny_model, tmp_path, monkeypatch):
    """--model FILE.gguf converts the file into the cache once, and uses the cached store the next time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = copy.deepcopy(tiny_model)
    model.config.mlp_only_layers = []
    write_model(tmp_path / "model.gguf", type(model)(model.config), a_tokenizer())
    first = resolve_store(tmp_path / "model.gguf")
    written = (first / "store.json").stat().st_mtime_ns
    assert resolve_store(tmp_path / "model.gguf") == first
    assert (first / "store.json").stat().st_mtime_ns == written


@pytest.mark.e2e
def test_convert_prints_the_error(gptq, tmp_path, capsys):
    """The command prints the error as text and as JSON."""
    command = typer.main.get_command(app)
    command.main(["convert", str(gptq), str(tmp_path / "store"), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["source_error"] == 0.0
    command.main(["inspect", str(tmp_path / "store")], standalone_mode=False)
    assert "source error" in capsys.readouterr().out


@pytest.mark.e2e
@pytest.mark.covers("MXFP4", "gpt_oss")
def test_a_gpt_oss_in_mxfp4_answers_as_its_dequantized_self(open_engine, tmp_path):
    """The published form of the checkpoint, with packed experts and plain biases, gives transformers' logits."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    made = random_model("gpt_oss")
    plain, packed = save(made, tmp_path / "plain", fused=False), tmp_path / "packed"
    shutil.copytree(plain, packed)
    generator, tensors, out = torch.Generator().manual_seed(3), load_file(plain / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            out[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 124, shape, generator=generator, dtype=torch.uint8)
        out |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.bfloat16)
        tensors[name] = dense.to(weight.dtype).contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(out, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    store = convert_checkpoint(packed, tmp_path / "store", max_level=None, layout="auto", dense_bits=16)
    assert (store.max_level, store.source_format) == (8, "MXFP4")
    engine = open_engine(tmp_path / "store", level=8)
    sequence = engine.sequences.new()
    got = engine.all_logits(sequence, TOKENS, decode=False).float().log_softmax(-1)
    with torch.no_grad():
        want = load(plain)(torch.tensor([TOKENS])).logits[0].float().log_softmax(-1)
    kl = (want.exp() * (want - got)).sum(-1)
    assert kl.median() < 0.001
    wrong = want.roll(1, 0)
    assert (wrong.exp() * (wrong - got)).sum(-1).median() > 0.05


def test_kept_codes_are_not_calibrated(run, gptq, tmp_path):
    """A checkpoint with 4-bit codes is refused before anything is converted."""
    code, _, err = run("convert", gptq, tmp_path / "store", "--calibrate", "self")
    assert code == 2
    assert "codes that a store keeps as they are" in err
    assert not (tmp_path / "store").exists()
