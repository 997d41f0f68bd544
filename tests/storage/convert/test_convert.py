"""Conversion: a store against the weights of its model, and failures."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from programs import programs, run_forked
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_conversion import contents
from transformers import AutoConfig, AutoTokenizer

from edgemoe.errors import DamagedData, DoesNotFit, MissingTensor, ModelRefused, UserError
from edgemoe.families.table import family_of
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.run import convert
from edgemoe.storage.record.decode import decode
from edgemoe.storage.record.layout import LAYOUTS
from edgemoe.storage.record.planes import dequantize, quantize
from edgemoe.storage.store import dense_groups
from edgemoe.storage.store.manifest import Manifest
from edgemoe.storage.store.writer import StoreWriter

LAYOUT = LAYOUTS["cpu-generic"]
MOE_LAYERS, EXPERTS, HIDDEN, INNER = (0, 2), 8, 64, 32


def run(
    source: Path, destination: Path, *, max_level=8, layout=LAYOUT, dense_bits=16, progress=None
) -> Manifest:
    return convert(
        source,
        destination,
        family_of(Checkpoint.open(source).config),
        max_level=max_level,
        layout=layout,
        dense_bits=dense_bits,
        progress=progress or (lambda done, total: None),
    )


def change(source: Path, destination: Path, edit) -> Path:
    """A copy of a checkpoint in one file, with the changes of `edit` to its dict of tensors."""
    shutil.copytree(source, destination)
    tensors = load_file(destination / "model.safetensors")
    edit(tensors)
    save_file(tensors, destination / "model.safetensors", {"format": "pt"})
    return destination


@pytest.fixture(scope="module")
def store(checkpoint, tmp_path_factory):
    """The checkpoint converted at level 8, dense weights in bf16. Not to be changed."""
    directory = tmp_path_factory.mktemp("store") / "l8"
    run(checkpoint, directory)
    return directory


@pytest.mark.parametrize("max_level", [8, 4])
def test_fused_and_separate_experts_give_the_same_store(checkpoint, fused_checkpoint, tmp_path, max_level):
    """Records and dense weights do not depend on the checkpoint's form of its experts."""
    run(checkpoint, tmp_path / "a", max_level=max_level)
    run(fused_checkpoint, tmp_path / "b", max_level=max_level)
    a, b = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert a.keys() == b.keys()
    weights = [name for name in a if name.endswith(".safetensors")]
    assert len(weights) == len(MOE_LAYERS) + 1
    assert all(a[name] == b[name] for name in weights)


def test_records_are_the_models_experts(store, tiny_model):
    """Every record decodes to its expert's weights, within the error of each level; gate above up."""
    geometry, state = Manifest.load(store).geometry, tiny_model.state_dict()
    bounds = {8: (0.001, 0.01), 4: (0.03, 0.12), 2: (0.2, 0.45)}
    for layer in MOE_LAYERS:
        experts = f"model.layers.{layer}.mlp.experts"
        with safe_open(store / f"experts-{layer:05d}.safetensors", "np") as file:
            for expert in range(EXPERTS):
                record = file.get_tensor(f"experts.{layer}.{expert}")
                source = (state[f"{experts}.gate_up_proj"][expert], state[f"{experts}.down_proj"][expert])
                for level, (least, most) in bounds.items():
                    for got, weight in zip(decode(record, geometry, LAYOUT, level), source, strict=True):
                        error = float((got - weight.float()).norm() / weight.float().norm())
                        assert least < error < most, (layer, expert, level)


def test_records_are_exactly_the_quantized_matrices(store, tiny_model):
    """Decoded records equal, bit for bit, the quantized and dequantized matrices of the model."""
    geometry, state = Manifest.load(store).geometry, tiny_model.state_dict()
    gate_up = state["model.layers.2.mlp.experts.gate_up_proj"][5].float()
    down = state["model.layers.2.mlp.experts.down_proj"][5].float()
    with safe_open(store / "experts-00002.safetensors", "np") as file:
        record = file.get_tensor("experts.2.5")
    for level in (8, 4, 2):
        got = decode(record, geometry, LAYOUT, level)
        for matrix, weight, group in ((got[0], gate_up, 64), (got[1], down, 32)):
            assert torch.equal(matrix, dequantize(*quantize(weight, group), level))


@pytest.mark.parametrize(("max_level", "record"), [(8, 20_480), (4, 12_288)])
def test_bytes_on_disk(checkpoint, tmp_path, max_level, record):
    """A layer's file is a block of header and 8 records, whose size follows from the shapes by hand.

    Parameters: (64 + 64) groups of 4 bytes in one block. Nibbles: 64 x 64 / 2 + 64 x 32 / 2 = 3,072 bytes,
    padded to two blocks; half of them to each of base and d4, as many again to d8.
    """
    run(checkpoint, tmp_path / "store", max_level=max_level)
    for layer in MOE_LAYERS:
        assert (tmp_path / f"store/experts-{layer:05d}.safetensors").stat().st_size == 4096 + EXPERTS * record


def test_dense_weights_at_16_bits_keep_their_bits(store, checkpoint):
    """All tensors outside of experts, routers included, keep their names and bits."""
    dense, source = load_file(store / "dense.safetensors"), load_file(checkpoint / "model.safetensors")
    assert dense.keys() == {name for name in source if ".experts." not in name}
    for name, tensor in dense.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, source[name])


def test_dense_weights_at_8_bits(checkpoint, tmp_path):
    """Matrices become int8 with a bf16 scale per row, close to the source; norms and routers do not change."""
    run(checkpoint, tmp_path / "store", dense_bits=8)
    dense, source = (
        load_file(tmp_path / "store/dense.safetensors"),
        load_file(checkpoint / "model.safetensors"),
    )
    matrices = 0
    for name, weight in source.items():
        if ".experts." in name:
            continue
        if weight.dim() == 1 or name.endswith("mlp.gate.weight"):
            assert torch.equal(dense.pop(name), weight)
            continue
        codes, scales = dense.pop(name), dense.pop(name + "_scale")
        assert (codes.dtype, codes.shape) == (torch.int8, weight.shape)
        assert (scales.dtype, scales.shape) == (torch.bfloat16, weight.shape[:1])
        error = codes.float() * scales.float()[:, None] - weight.float()
        assert bool((error.abs() <= weight.float().abs().amax(1, keepdim=True) / 250).all())
        matrices += 1
    assert not dense
    assert matrices == 2 + 3 * 4 + 3  # embedding and head, attention, and the dense layer's MLP


@pytest.mark.parametrize("bits", [4, 6])
def test_dense_weights_in_groups(checkpoint, tmp_path, bits):
    """Matrices of attention and of the dense layer are in groups of 64 inputs; embedding and head have 8 bits.

    A module one of whose matrices has no whole groups keeps 8 bits in all of them, as their rows are joined.
    """
    run(checkpoint, tmp_path / "store", dense_bits=bits)
    assert Manifest.load(tmp_path / "store").dense_bits == bits
    dense, source = (
        load_file(tmp_path / "store/dense.safetensors"),
        load_file(checkpoint / "model.safetensors"),
    )
    found = set()
    for name, tensor in dense.items():
        if tensor.dtype != torch.uint8:
            continue
        want = dequantize(*quantize(source[name].float(), 64), bits)
        assert torch.equal(dense_groups.decoded(tensor), want)
        assert tensor.numel() == want.numel() * (bits + 0.5) / 8
        found.add(name)
    assert {name.split(".", 3)[3] for name in found} == {f"self_attn.{each}_proj.weight" for each in "qkvo"}
    assert len(found) == 3 * 4
    kept = {name for name, tensor in dense.items() if tensor.dtype == torch.int8}
    assert {"lm_head.weight", "model.embed_tokens.weight"} < kept
    assert {name for name in kept if ".mlp." in name}, "down of the dense layer has 32 columns"


def test_a_float32_source_becomes_bf16(checkpoint, tmp_path):
    """Norms included, dense weights are rounded to bf16 as transformers rounds a model loaded in bf16."""

    def widen(tensors):
        for name in tensors:
            tensors[name] = tensors[name].float() * 1.001

    source = change(checkpoint, tmp_path / "fp32", widen)
    run(source, tmp_path / "store")
    wide = load_file(source / "model.safetensors")
    for name, tensor in load_file(tmp_path / "store/dense.safetensors").items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, wide[name].to(torch.bfloat16))


def test_companions_are_copied_and_nothing_else(store, checkpoint):
    """The store has the model's config and tokenizer, readable by transformers, and no other file."""
    there = contents(store)
    copied = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    copied.add("chat_template.jinja")
    records = {f"experts-{layer:05d}.safetensors" for layer in MOE_LAYERS}
    assert there.keys() == copied | records | {"dense.safetensors", "store.json"}
    assert all(there[name] == (checkpoint / name).read_bytes() for name in copied)
    assert AutoConfig.from_pretrained(store).model_type == "qwen3_moe"
    text = "Ünïcode <|im_end|> and all"
    expected = AutoTokenizer.from_pretrained(checkpoint)(text).input_ids
    assert AutoTokenizer.from_pretrained(store)(text).input_ids == expected


def test_progress_ends_at_the_weights_bytes(checkpoint, tmp_path):
    """The callback gets ascending counts up to the bytes of all source tensors."""
    seen = []
    run(checkpoint, tmp_path / "store", progress=lambda *counts: seen.append(counts))
    total = sum(tensor.nbytes for tensor in load_file(checkpoint / "model.safetensors").values())
    assert {total for _, total in seen} == {total}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == total


@pytest.mark.parametrize("matrix", ["gate", "up", "down"])
def test_a_missing_expert_tensor_is_fatal_before_anything_is_written(checkpoint, tmp_path, matrix):
    """The missing tensor is reported by name, and the destination is not created."""
    name = f"model.layers.2.mlp.experts.7.{matrix}_proj.weight"
    source = change(checkpoint, tmp_path / "source", lambda tensors: tensors.pop(name))
    with pytest.raises(MissingTensor, match=name):
        run(source, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_an_expert_tensor_of_another_shape_is_missing(checkpoint, tmp_path):
    """A shape that differs from the config is refused, with both shapes in the message."""
    name = "model.layers.0.mlp.experts.3.down_proj.weight"

    def cut(tensors):
        tensors[name] = tensors[name][:, :16].contiguous()

    with pytest.raises(MissingTensor, match=r"\(64, 32\).*\(64, 16\)"):
        run(change(checkpoint, tmp_path / "source", cut), tmp_path / "store")


def test_a_fused_tensor_with_too_few_experts_is_missing(fused_checkpoint, tmp_path):
    """A config with more experts than the fused tensor is refused."""
    source = Path(shutil.copytree(fused_checkpoint, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_local_experts": 9}))
    with pytest.raises(MissingTensor, match=r"\(9, 64, 64\).*\(8, 64, 64\)"):
        run(source, tmp_path / "store")


@pytest.mark.parametrize("values", [{"num_local_experts": 6}, {"mlp_only_layers": [0, 1]}])
def test_experts_outside_of_the_config_are_refused(checkpoint, tmp_path, values):
    """Expert weights outside of the config are refused instead of stored as dense weights."""
    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(ModelRefused, match="more tensors with expert weights"):
        run(source, tmp_path / "store")


def test_a_model_without_experts_is_refused(checkpoint, tmp_path):
    """A config with dense layers only is refused."""
    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"mlp_only_layers": [0, 1, 2]}))
    with pytest.raises(ModelRefused, match="the model is dense"):
        run(source, tmp_path / "store")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_name_their_expert(checkpoint, tmp_path, value):
    """The message contains layer, expert and matrix, and the store stays unfinished."""

    def damage(tensors):
        tensors["model.layers.2.mlp.experts.4.up_proj.weight"][3, 5] = value

    with pytest.raises(DamagedData, match="layer 2, expert 4, matrix gate_up"):
        run(change(checkpoint, tmp_path / "source", damage), tmp_path / "store")
    assert not (tmp_path / "store/store.json").exists()


def test_dense_weights_that_are_not_finite_are_named(checkpoint, tmp_path):
    """The message contains the tensor's name."""

    def damage(tensors):
        tensors["model.norm.weight"][0] = float("nan")

    with pytest.raises(DamagedData, match=r"model\.norm\.weight"):
        run(change(checkpoint, tmp_path / "source", damage), tmp_path / "store")


@pytest.mark.parametrize("name", ["model.extra", "model.layers.0.mlp.experts.0.up_proj.weight"])
def test_quantized_tensors_are_refused_before_writing(checkpoint, tmp_path, name):
    """Integer tensors, of experts or not, are refused by name."""

    def quantized(tensors):
        tensors[name] = torch.zeros(INNER, HIDDEN, dtype=torch.int8)

    with pytest.raises(ModelRefused, match=name):
        run(change(checkpoint, tmp_path / "source", quantized), tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_name_of_scales_is_refused(checkpoint, tmp_path):
    """A tensor with the name of another tensor's scales is refused."""

    def add(tensors):
        tensors["lm_head.weight_scale"] = torch.ones(300)

    source = change(checkpoint, tmp_path / "source", add)
    with pytest.raises(ModelRefused, match=r"lm_head\.weight_scale"):
        run(source, tmp_path / "store", dense_bits=8)


class Killed(BaseException):
    """Not an Exception, so that no handler catches it."""


@pytest.mark.e2e
@pytest.mark.parametrize("step", [1, 8, 9, 16, 17, 30, 41])
def test_an_interrupted_conversion_resumes_to_the_same_bytes(checkpoint, store, tmp_path, step):
    """A conversion stopped after any expert or tensor leaves no store, and the next run completes the same bytes."""
    calls = []

    def stop(count, total):
        calls.append(count)
        if len(calls) == step:
            raise Killed

    with pytest.raises(Killed):
        run(checkpoint, tmp_path / "store", progress=stop)
    assert not (tmp_path / "store/store.json").exists()
    first = []
    run(checkpoint, tmp_path / "store", progress=lambda done, total: first.append(done))
    assert contents(tmp_path / "store") == contents(store)
    layers_done = min((step - 1) // EXPERTS, len(MOE_LAYERS))
    layer_bytes = 3 * HIDDEN * INNER * 2 * EXPERTS
    assert first[:layers_done] == [layer_bytes * (i + 1) for i in range(layers_done)]
    assert (first[layers_done] - layer_bytes * layers_done) < layer_bytes


KILL = """
import os, signal, sys
from pathlib import Path
from edgemoe.families.table import family_of
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.run import convert
from edgemoe.storage.record.layout import LAYOUTS

source, calls = Path(sys.argv[1]), []

def die(done, total):
    calls.append(done)
    if len(calls) == 12:
        os.kill(os.getpid(), signal.SIGKILL)

convert(source, Path(sys.argv[2]), family_of(Checkpoint.open(source).config), max_level=8,
        layout=LAYOUTS["cpu-generic"], dense_bits=16, progress=die)
"""


@pytest.mark.e2e
def test_a_killed_conversion_resumes_to_the_same_bytes(checkpoint, store, tmp_path):
    """After SIGKILL in the second layer, the next run completes the store and leaves no other file."""
    assert run_forked("-c", KILL, checkpoint, tmp_path / "store").returncode == -signal.SIGKILL
    assert not (tmp_path / "store/store.json").exists()
    run(checkpoint, tmp_path / "store")
    assert contents(tmp_path / "store") == contents(store)


def test_a_finished_store_is_left_alone(checkpoint, store, tmp_path):
    """A second identical conversion reads no weights, writes no file, and returns the manifest."""
    times = {path: path.stat().st_mtime_ns for path in store.iterdir()}
    again = run(checkpoint, store, progress=lambda done, total: pytest.fail("weights were read"))
    assert again == Manifest.load(store)
    assert {path: path.stat().st_mtime_ns for path in store.iterdir()} == times


def test_a_store_that_is_finished_before_its_lock_is_left_alone(checkpoint, tmp_path, monkeypatch):
    """Where another process finishes the store between the first look and the lock, no file is written again."""
    times: dict[Path, int] = {}
    enter = StoreWriter.__enter__

    def late(writer: StoreWriter) -> StoreWriter:
        if not times:
            times[tmp_path] = 0
            run(checkpoint, tmp_path / "store")
            times.update((path, path.stat().st_mtime_ns) for path in (tmp_path / "store").iterdir())
        return enter(writer)

    monkeypatch.setattr(StoreWriter, "__enter__", late)
    assert run(checkpoint, tmp_path / "store") == Manifest.load(tmp_path / "store")
    del times[tmp_path]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()} == times


@pytest.mark.parametrize("other", [{"max_level": 4}, {"dense_bits": 8}, {"layout": LAYOUTS["cuda"]}])
def test_a_store_of_other_options_is_not_overwritten(checkpoint, store, other):
    """A conversion with another level, layout or dense width into the same directory is refused; no byte changes."""
    before = contents(store)
    with pytest.raises(UserError, match=store.name):
        run(checkpoint, store, **other)
    assert contents(store) == before


def test_a_store_of_another_source_is_not_overwritten(checkpoint, store, tmp_path):
    """A conversion of the same model with one changed weight is refused."""

    def touch(tensors):
        tensors["lm_head.weight"][0, 0] += 1

    before = contents(store)
    with pytest.raises(UserError, match="source"):
        run(change(checkpoint, tmp_path / "source", touch), store)
    assert contents(store) == before


def test_the_checkpoints_own_directory_is_refused(checkpoint, tmp_path):
    """The checkpoint's own directory is refused as destination."""
    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
    before = contents(source)
    with pytest.raises(UserError):
        run(source, source)
    assert contents(source) == before


def test_a_source_that_changes_gives_no_store(checkpoint, tmp_path):
    """A source that changes during the conversion gives no store."""
    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))

    def replace_tokenizer(count, total):
        (source / "tokenizer.json").write_text("{}")

    with pytest.raises(DamagedData, match="changed"):
        run(source, tmp_path / "store", progress=replace_tokenizer)
    assert not (tmp_path / "store/store.json").exists()


def test_a_disk_that_is_too_small_for_everything_is_refused_at_once(checkpoint, tmp_path, free_disk):
    """Free bytes for one layer are too few: no file is written, and the message contains the bytes needed."""
    free_disk(200_000)
    with pytest.raises(DoesNotFit) as refused:
        run(checkpoint, tmp_path / "store")
    assert refused.value.minimum >= 2 * EXPERTS * 20_480
    assert not list((tmp_path / "store").glob("*.safetensors*"))


MEASURE = """
import sys
from pathlib import Path
from edgemoe.families.table import family_of
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.run import convert
from edgemoe.storage.record.layout import LAYOUTS

def status(field):
    line = next(l for l in open("/proc/self/status") if l.startswith(field))
    return int(line.split()[1]) * 1024

def run(source, destination):
    convert(Path(source), Path(destination), family_of(Checkpoint.open(Path(source)).config), max_level=8,
            layout=LAYOUTS["cpu-generic"], dense_bits=8, progress=lambda done, total: None, threads=2)

small, large, work = sys.argv[1:]
run(small, work + "/small-store")
family_of(Checkpoint.open(Path(large)).config)  # imports transformers where the family is not in the user's cache
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
run(large, work + "/large-store")
print(status("VmHWM") - before)
"""


@pytest.mark.e2e
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured through /proc"
)
def test_peak_memory_is_a_few_experts_not_the_checkpoint(checkpoint, tmp_path):
    """Two threads convert 100 MB of fused experts, 50 MB per layer, in less than 36 MB of additional memory."""
    source = tmp_path / "large"
    shutil.copytree(checkpoint, source)
    config = json.loads((source / "config.json").read_text())
    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_local_experts": 32}
    sizes |= {"num_hidden_layers": 2, "mlp_only_layers": []}
    (source / "config.json").write_text(json.dumps(config | sizes))
    ramp = torch.arange(32 * 1024 * 512).remainder(1009).sub(504).div(1000).to(torch.bfloat16)
    tensors = {"model.embed_tokens.weight": torch.ones(300, 512, dtype=torch.bfloat16)}
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        tensors[f"{experts}.gate_up_proj"] = ramp.view(32, 1024, 512).clone()
        tensors[f"{experts}.down_proj"] = ramp[: 32 * 512 * 512].view(32, 512, 512).clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    del tensors
    with programs() as start:
        measured = start("-c", MEASURE, checkpoint, source, tmp_path)
        out, err = measured.communicate(timeout=120)
    assert measured.returncode == 0, err
    assert (source / "model.safetensors").stat().st_size > 2.5 * 36e6
    assert int(out) < 36e6
