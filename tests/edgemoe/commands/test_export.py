"""`edgemoe export`: every family through transformers, the printed error, refusals, and `edgemoe verify`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from family_models import SMALL, blocks_of, load, random_model, save
from gguf_files import write_model
from pairwise import few, pairwise
from resealed_store import reseal
from safetensors.torch import load_file
from small_store import flip

from edgemoe.families.table import family_of
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.heat import save_heat
from edgemoe.storage.base import ExpertKey
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.export.directory import UNFINISHED_NAME
from edgemoe.storage.files.header import read_header
from edgemoe.storage.store import dense_groups
from edgemoe.storage.store.calibration import TEXT, Calibration
from edgemoe.storage.store.manifest import Manifest

OPTIONS = {"max_level": 8, "layout": "cpu-generic", "dense_bits": 16}


@pytest.fixture(scope="module")
def family_store(tmp_path_factory):
    """Makes a store of a small random model of a family; returns the model and the store."""

    def make(model_type, *, fused=False, dense_bits=16, **changes):
        directory = tmp_path_factory.mktemp(model_type)
        model = random_model(model_type, **changes)
        save(model, directory / "model", fused=fused)
        convert_checkpoint(directory / "model", directory / "store", **OPTIONS | {"dense_bits": dense_bits})
        return model, directory / "store"

    return make


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("bits", "kind", "error"), [(4, "Q4_1", 2**-9), (5, "Q5_1", 2**-9), (6, "Q8_0", 2**-7)]
)
def test_gguf_has_dense_codes_in_groups(run, family_store, tmp_path, bits, kind, error):
    """Of 4 and 5 bits the store's numbers to the rounding of float16, in llama.cpp's row order; 6 are coded again."""
    _, store = family_store("mixtral", dense_bits=bits, sliding_window=None)
    assert run("export", store, tmp_path / "out", "--format", "gguf")[0] == 0
    kinds = {
        tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "out/model.gguf").tensors
    }
    assert kinds["blk.0.attn_q.weight"] == gguf.GGMLQuantizationType[kind]
    read, dense = Checkpoint.open(tmp_path / "out"), load_file(store / "dense.safetensors")
    grouped = [name for name, tensor in dense.items() if tensor.dtype == torch.uint8]
    assert len(grouped) >= 4
    for name in grouped:
        want = dense_groups.decoded(dense[name])
        assert (read[name].read().float() - want).norm() < error * want.norm()


@pytest.mark.e2e
@pairwise(
    alone=["model_type"],
    slow=[name for name in SMALL if name not in ("qwen3_moe", "mixtral", "olmoe", "granitemoe", "gpt_oss")],
    model_type=SMALL,
    fused=[False, True],
)
def test_every_family_loads_in_transformers(run, family_store, tmp_path, model_type, fused):
    """The exported weights are the source's within 8 bits, under names that transformers finds, fused or not."""
    model, store = family_store(model_type, fused=fused)
    code, out, _ = run("export", store, tmp_path / "out", "--format", "safetensors")
    assert code == 0
    assert "relative error 0.00" in out
    found = dict(load(tmp_path / "out").named_parameters())
    for name, wanted in model.named_parameters():
        error = (found[name].float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-9)
        assert error <= (0.012 if ".experts." in name else 0), name


@pytest.mark.e2e
def test_a_tied_head_is_written(run, family_store, tmp_path):
    """vLLM's olmoe and others never tie the head: a tied model's head is a copy of its embedding, and not tied."""
    model, store = family_store("olmoe", tie_word_embeddings=True)
    assert run("export", store, tmp_path / "out", "--level", "8")[0] == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], model.model.embed_tokens.weight)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.e2e
@pytest.mark.parametrize("model_type", few(SMALL, ["qwen3_moe", "mixtral", "granitemoe", "gpt_oss"]))
def test_quantized_names_are_those_of_the_hub(run, family_store, tmp_path, model_type):
    """Each expert has its packed gate, up and down, or the family is refused by name; nothing else is quantized."""
    _, store = family_store(model_type)
    code, _, err = run("export", store, tmp_path / "out", "--level", "4")
    family = family_of(json.loads((store / "config.json").read_text()))
    family = family.quantized_as or family
    if family.separate(0, 0) is None:
        assert code == 2
        assert model_type in err
        return
    assert code == 0, err
    for name, entry in read_header(tmp_path / "out" / "model.safetensors").tensors.items():
        assert entry.range.offset % {"I64": 8, "I32": 4, "F32": 4, "BF16": 2}[entry.dtype] == 0, name
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    packed = {name for name in tensors if name.endswith("weight_packed")}
    layers = Manifest.load(store).layers
    assert packed == {
        f"{name}_packed" for layer in layers for e in range(8) for name in family.separate(layer, e) or ()
    }
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    linear = {n.removesuffix(".weight") for n, t in tensors.items() if n.endswith(".weight") and t.ndim == 2}
    assert linear <= set(settings["ignore"])
    opened = Checkpoint.open(tmp_path / "out")
    assert opened.format == "compressed-tensors"
    assert opened.config["model_type"] == family.model_type


@pytest.mark.e2e
def test_compressed_tensors_loads_in_transformers(run, family_store, tmp_path):
    """transformers with compressed-tensors computes with the weights that the export says."""
    pytest.importorskip("compressed_tensors")
    model, store = family_store("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    assert run("export", store, tmp_path / "out", "--level", "4")[0] == 0
    found = dict(load(tmp_path / "out").named_parameters())
    for name, wanted in model.named_parameters():
        difference = (found[name] - wanted).detach().float().norm()
        error = float(difference / wanted.detach().float().norm())
        assert 0.05 < error < 0.14 if ".experts." in name else error == 0, name


@pytest.mark.e2e
@pytest.mark.parametrize("level", ["4", "8"])
def test_a_model_with_multipliers_loads_in_transformers_without_them(run, family_store, tmp_path, level):
    """granitemoe's quantized export is a Mixtral model: with the same experts both compute the same, but for rounding.

    transformers finds granitemoe's experts in fused tensors alone, which compressed-tensors does not unpack.
    """
    pytest.importorskip("compressed_tensors")
    changes = {"embedding_multiplier": 7.0, "residual_multiplier": 0.22, "logits_scaling": 0.6}
    changes |= {"attention_multiplier": 4.0, "rms_norm_eps": 0.03}
    model, store = family_store("granitemoe", hidden_size=128, intermediate_size=64, **changes)
    assert run("export", store, tmp_path / "out", "--level", level)[0] == 0
    found = torch.nn.Module.float(load(tmp_path / "out"))
    for theirs, ours in zip(blocks_of(found), blocks_of(model), strict=True):
        for name, weight in theirs.experts.named_parameters():
            source = getattr(ours.experts, name)
            error = float((weight - source).norm().detach() / source.float().norm().detach())
            assert {"4": 0.05, "8": 0.001}[level] < error < {"4": 0.14, "8": 0.012}[level]
            source.data = weight.data.to(torch.bfloat16)
    tokens = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted, got = (each(tokens).logits.log_softmax(-1) for each in (model.float(), found))
    assert float((wanted.exp() * (wanted - got)).sum(-1).mean()) < 3e-5
    assert float(wanted.std()) > 0.5


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("model_type", "level"), [("qwen3_moe", 4), ("qwen3_moe", 8), ("olmoe", 4), ("granitemoe", 8)]
)
def test_gguf_is_the_file_of_llama_cpps_converter(run, family_store, tmp_path, model_type, level):
    """Fields, names, shapes and weights equal a file that tests write as llama.cpp's converter does."""
    from small_tokenizer import a_tokenizer

    changes = {"qwen3_moe": {"head_dim": 32}, "olmoe": {"clip_qkv": None, "num_key_value_heads": 4}}
    model, store = family_store(model_type, tie_word_embeddings=False, **changes.get(model_type, {}))
    assert run("export", store, tmp_path / "out", "--format", "gguf", "--level", level)[0] == 0
    write_model(tmp_path / "theirs.gguf", model, a_tokenizer())
    mine, theirs = (
        gguf.GGUFReader(path) for path in (tmp_path / "out" / "model.gguf", tmp_path / "theirs.gguf")
    )
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF.") and name != "tokenizer.ggml.pre":
            assert mine.fields[name].contents() == field.contents(), name
    own = {tensor.name: tensor for tensor in mine.tensors}
    assert own.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        found = own[tensor.name]
        assert list(found.shape) == list(tensor.shape)
        values = gguf.quants.dequantize(found.data, found.tensor_type)
        wanted = tensor.data.astype(np.float32)
        error = np.linalg.norm(values - wanted) / np.linalg.norm(wanted)
        assert error < ({4: 0.12, 8: 0.012}[level] if "_exps" in tensor.name else 0.001), tensor.name


@pytest.mark.e2e
def test_gguf_pairs_the_rows_of_mixtral(run, family_store, tmp_path):
    """llama.cpp wants rows i and i + half of each head side by side; our reader turns them back, bit for bit."""
    model, store = family_store("mixtral", sliding_window=None)
    assert run("export", store, tmp_path / "out", "--format", "gguf")[0] == 0
    write_model(tmp_path / "theirs.gguf", model)
    mine, theirs = (
        {tensor.name: tensor.data.astype(np.float32) for tensor in gguf.GGUFReader(path).tensors}
        for path in (tmp_path / "out" / "model.gguf", tmp_path / "theirs.gguf")
    )
    for name in ("blk.0.attn_q.weight", "blk.1.attn_k.weight"):
        assert np.allclose(mine[name], theirs[name], atol=1e-6)
        assert not np.allclose(mine[name], np.roll(theirs[name], 1, 0), atol=1e-3)
    back = Checkpoint.open(tmp_path / "out")
    state = model.state_dict()
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"):
        assert torch.equal(back[name].read(), state[name].half().float())


@pytest.mark.e2e
def test_gguf_repeats_olmoes_heads_of_keys(run, family_store, tmp_path):
    """llama.cpp's OLMoE has as many heads of keys as of queries, and a head of its own: an equal model has both."""
    model, store = family_store("olmoe", clip_qkv=None, tie_word_embeddings=True)
    assert model.config.num_key_value_heads == 2
    code, _, err = run("export", store, tmp_path / "out", "--format", "gguf")
    assert code == 0, err
    names = {
        tensor.name: list(tensor.shape) for tensor in gguf.GGUFReader(tmp_path / "out/model.gguf").tensors
    }
    assert (names["blk.0.attn_k_norm.weight"], names["output.weight"]) == ([64], [64, 300])
    options = ("--max-level", "8", "--dense-bits", "bf16")
    assert run("convert", tmp_path / "out", tmp_path / "back", *options)[0] == 0
    assert run("export", tmp_path / "back", tmp_path / "st", "--format", "safetensors")[0] == 0
    found = load(tmp_path / "st")
    assert found.config.num_key_value_heads == 4
    for theirs, ours in zip(blocks_of(found), blocks_of(model), strict=True):
        ours.experts.load_state_dict(theirs.experts.state_dict())
    tokens = torch.randint(3, 300, (1, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        wanted, got = (each.float()(tokens).logits for each in (model, found))
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("model_type", "changes", "format", "words"),
    [
        ("olmoe", {}, "gguf", "clip_qkv"),
        ("olmoe", {"clip_qkv": None, "norm_topk_prob": True}, "gguf", "norm_topk_prob"),
        ("granitemoe", {"hidden_act": "gelu"}, "gguf", "hidden_act"),
        ("granitemoe", {"attention_bias": True}, "gguf", "attention_bias"),
        ("granitemoe", {"attention_bias": True}, "compressed-tensors", "attention_bias"),
        ("granitemoe", {"residual_multiplier": 0.0}, "compressed-tensors", "residual_multiplier"),
    ],
)
def test_what_an_engine_does_not_compute_is_refused(
    run, family_store, tmp_path, model_type, changes, format, words
):
    """Values that llama.cpp or the form without multipliers would ignore are named; nothing is written."""
    _, store = family_store(model_type, **changes)
    code, _, err = run("export", store, tmp_path / "out", "--format", format)
    assert code == 2
    assert words in err
    assert not (tmp_path / "out").exists()


@pytest.mark.e2e
def test_a_map_gives_each_layer_its_bits(run, family_store, tmp_path):
    """compressed-tensors mixes layers, safetensors experts too; both have the weights of the levels named."""
    model, store = family_store("qwen3_moe")
    (path := tmp_path / "map.json").write_text('{"*": 4, "1": 8}')
    assert run("export", store, tmp_path / "ct", "--level", path)[0] == 0
    groups = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [(g["weights"]["num_bits"], g["targets"]) for g in groups.values()] == [
        (8, [r"re:.*layers\.(1)\..*experts.*"]),
        (4, [r"re:.*layers\.(0|2)\..*experts.*"]),
    ]
    path.write_text('{"*": 8, "2.3": 2, "2.4": 0}')
    assert run("export", store, tmp_path / "st", "--format", "safetensors", "--level", path)[0] == 0
    tensors, wanted = load_file(tmp_path / "st" / "model.safetensors"), model.state_dict()
    for expert, (low, high) in {2: (0, 0.012), 3: (0.2, 0.6), 4: (1, 1)}.items():
        name = f"model.layers.2.mlp.experts.{expert}.down_proj.weight"
        source = wanted["model.layers.2.mlp.experts.down_proj"][expert].float()
        assert low <= float((tensors[name].float() - source).norm() / source.norm()) <= high
    code, _, err = run("export", store, tmp_path / "refused", "--level", path)
    assert (code, "layer 2" in err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--format", "awq"), "awq"),
        (("--level", "3"), "3"),
        (("--level", "2"), "2"),
        (("--level", "map-of-nothing.json"), "map-of-nothing"),
    ],
)
def test_wrong_requests_are_refused(run, tiny_store, tmp_path, arguments, words):
    """The message names the value; no directory is left."""
    code, _, err = run("export", tiny_store, tmp_path / "out", *arguments)
    assert code == 2
    assert words in err
    assert not (tmp_path / "out").exists()


def test_a_level_above_the_store_is_refused(run, checkpoint, tmp_path):
    """A store of 4 bits has no 8."""
    convert_checkpoint(checkpoint, tmp_path / "store", **OPTIONS | {"max_level": 4})
    code, _, err = run("export", tmp_path / "store", tmp_path / "out", "--level", "8")
    assert code == 2
    assert "at most 4" in err


@pytest.mark.e2e
@pytest.mark.parametrize("model_type", ["phimoe", "qwen2_moe", "gpt_oss"])
def test_gguf_refuses_other_architectures_by_name(run, family_store, tmp_path, model_type):
    """Only what the reader of GGUF files knows is written."""
    _, store = family_store(model_type)
    code, _, err = run("export", store, tmp_path / "out", "--format", "gguf")
    assert code == 2
    assert model_type in err


def test_verify_takes_an_export(run, tiny_store, tmp_path):
    """A whole export exits 0, a damaged one 4 with the file's name; --json says the same."""
    assert run("export", tiny_store, tmp_path / "out", "--json")[0] == 0
    assert run("verify", tmp_path / "out")[0] == 0
    flip(tmp_path / "out" / "model.safetensors", 5000)
    code, out, _ = run("verify", tmp_path / "out", "--json")
    assert code == 4
    result = json.loads(out.splitlines()[-1])
    assert not result["ok"]
    assert "model.safetensors" in result["damage"][0]


def test_an_unfinished_export_is_no_store(run, tmp_path):
    """verify says what to do with it."""
    (tmp_path / UNFINISHED_NAME).write_text("{}")
    code, _, err = run("verify", tmp_path)
    assert code == 2
    assert "edgemoe export` again" in err


@pytest.mark.e2e
def test_key_value_heads_that_the_config_leaves_out_are_as_many_as_heads(run, family_store, tmp_path):
    """llama.cpp's order of rows depends on their number: the file is as from a config that says it."""
    _, store = family_store("olmoe", num_key_value_heads=4, clip_qkv=None)
    config, files = json.loads((store / "config.json").read_text()), []
    for left_out in (set(), {"num_key_value_heads"}):
        kept = {key: value for key, value in config.items() if key not in left_out}
        (store / "config.json").write_text(json.dumps(kept))
        reseal(store, "config.json")
        code, _, err = run("export", store, out := tmp_path / f"{len(left_out)}", "--format", "gguf")
        assert code == 0, err
        files.append((out / "model.gguf").read_bytes())
    assert files[0] == files[1]


@pytest.fixture(scope="module")
def calibrated(family_store):
    """A store of two layers, whose calibration says that layer 1 and there expert 5 lose most at 4 bits."""
    _, store = family_store("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    manifest = Manifest.load(store)
    layers = sorted(manifest.layers)
    error = np.zeros((len(layers), 8, 4), np.float32)
    error[:, :, 1:] = 1.0
    error[layers.index(0), :, 1:] = 1.5
    error[layers.index(1), 5, 1:] = 50.0
    chosen = np.tile(np.arange(8, dtype=np.uint16), (len(layers), 3, 1))
    gates = np.full(chosen.shape, 0.125, np.float16)
    sensitivity = np.ones(len(layers), np.float32)
    shape = manifest.source, 8, TEXT, "a.txt", 3, tuple(layers), error, sensitivity, chosen, gates
    Calibration(*shape).save(store)
    return store


def layers_of_8_bits(out: Path) -> list[str]:
    """The modules that an export has as 8-bit integers."""
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    return {group["weights"]["num_bits"]: group["targets"] for group in groups.values()}[8]


@pytest.mark.e2e
def test_a_mean_of_bits_gives_levels_by_calibration(run, calibrated, tmp_path):
    """Half the bits above 4: layer 1 has 8-bit integers where a format mixes layers; heat.json changes the choice."""
    store = shutil.copytree(calibrated, tmp_path / "store")
    manifest = Manifest.load(store)
    mean = f"bits:{4 + 4 / len(manifest.layers)}"
    assert run("export", store, tmp_path / "out", "--level", mean)[0] == 0
    assert layers_of_8_bits(tmp_path / "out") == [r"re:.*layers\.(1)\..*experts.*"]
    # Layer 1's lossy expert is never in use; layer 0's share of its bits is then as large, and it comes first.
    cold = {ExpertKey(1, expert): 1.0 for expert in range(8) if expert != 5}
    save_heat(store, manifest, cold)
    assert run("export", store, tmp_path / "hot", "--level", mean)[0] == 0
    assert layers_of_8_bits(tmp_path / "hot") == [r"re:.*layers\.(0)\..*experts.*"]


@pytest.mark.parametrize("level", ["bits:3.5", "bits:9", "bits:nan", "bits:", "bits:x"])
def test_a_mean_that_formats_lack_is_refused(run, calibrated, tmp_path, level):
    """Formats have 8 and 4 bits, and nothing outside of them."""
    code, _, err = run("export", calibrated, tmp_path / "out", "--level", level)
    assert code == 2
    assert "4 to 8" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.e2e
def test_a_mean_without_calibration_is_refused(run, family_store, tmp_path):
    """The message names the missing file and the command that writes it."""
    _, store = family_store("qwen3_moe")
    code, _, err = run("export", store, tmp_path / "out", "--level", "bits:6")
    assert code == 2
    assert "calibration.safetensors" in err
    assert "edgemoe calibrate" in err


@pytest.mark.e2e
def test_a_mean_needs_level_8(run, family_store, tmp_path):
    """A store of 4 bits has nothing to add where bits are worth most."""
    _, store = family_store("qwen3_moe")
    convert_checkpoint(store.with_name("model"), tmp_path / "four", **OPTIONS | {"max_level": 4})
    code, _, err = run("export", tmp_path / "four", tmp_path / "out", "--level", "bits:6")
    assert code == 2
    assert "level 8" in err
