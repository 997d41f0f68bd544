"""Checkpoints: tensors are equal to the safetensors library's, and unsafe contents are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from edgemoe.errors import BadHeader, MissingTensor, ModelRefused, ReadFailed, TruncatedFile
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.config import bounded_config

INDEX = "model.safetensors.index.json"
FUSED = "model.layers.2.mlp.experts.gate_up_proj"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the one-file checkpoint that a test may damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.fixture
def sharded(fused_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the sharded checkpoint that a test may damage."""
    return Path(shutil.copytree(fused_checkpoint, tmp_path / "sharded"))


def edit(path: Path, change) -> None:
    """Rewrites a JSON file with the changes of `change`."""
    parsed = json.loads(path.read_text())
    change(parsed)
    path.write_text(json.dumps(parsed))


def point_shard(directory: Path, target: str) -> None:
    """Maps one fused tensor to `target` in the index."""
    edit(directory / INDEX, lambda index: index["weight_map"].update({FUSED: target}))


@pytest.mark.covers("safetensors")
@pytest.mark.parametrize("form", ["checkpoint", "fused_checkpoint"])
def test_reads_equal_those_of_safetensors(form, request):
    """Names, shapes, dtypes and every bit agree with the safetensors library, in one file and in shards."""
    directory = request.getfixturevalue(form)
    opened = Checkpoint.open(directory)
    expected = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            expected |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert opened.names() == set(expected)
    for name, tensor in expected.items():
        assert (opened[name].shape, opened[name].dtype) == (tuple(tensor.shape), tensor.dtype)
        assert opened[name].nbytes == tensor.nbytes
        torch.testing.assert_close(opened[name].read(), tensor, rtol=0, atol=0)


def test_a_slice_is_one_expert_of_a_fused_tensor(fused_checkpoint):
    """read_slice(e) equals tensor[e], and raises IndexError for a missing expert."""
    opened = Checkpoint.open(fused_checkpoint)
    whole = opened[FUSED].read()
    for expert in range(8):
        assert torch.equal(opened[FUSED].read_slice(expert), whole[expert])
    for outside in (-1, 8):
        with pytest.raises(IndexError):
            opened[FUSED].read_slice(outside)


@pytest.mark.covers("safetensors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_and_rank_keeps_its_bits(copy, dtype):
    """Scalars, empty tensors and vectors of every supported dtype are read with the saved bits."""
    tensors = {"scalar": torch.tensor(1.5, dtype=dtype), "empty": torch.empty(0, 3, dtype=dtype)}
    tensors["vector"] = torch.tensor([0.1, -2.0, 3.0], dtype=dtype)
    save_file(tensors, copy / "model.safetensors")
    opened = Checkpoint.open(copy)
    for name, tensor in tensors.items():
        read = opened[name].read()
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read, tensor)


def test_quantized_tensors_are_refused_on_use(copy):
    """A tensor of integers is refused as a weight, with its name and type in the message."""
    save_file({"packed": torch.zeros(4, dtype=torch.int32)}, copy / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"packed.*I32"):
        Checkpoint.open(copy)["packed"].read()


def test_unknown_name_is_a_missing_tensor(checkpoint):
    """The error for an unknown name contains the name."""
    with pytest.raises(MissingTensor, match=r"model\.nowhere"):
        Checkpoint.open(checkpoint)["model.nowhere"].read()


@pytest.mark.parametrize("target_kind", ["dots", "absolute", "link"])
def test_a_shard_outside_the_directory_is_refused(sharded, target_kind):
    """A weight_map that leads out of the directory, by .., an absolute path or a link, is refused."""
    outside = sharded.parent / "outside.safetensors"
    save_file({FUSED: torch.zeros(8, 64, 64)}, outside)
    if target_kind == "link":
        (sharded / "link.safetensors").symlink_to(outside)
    point_shard(
        sharded,
        {"dots": "../outside.safetensors", "absolute": str(outside), "link": "link.safetensors"}[target_kind],
    )
    with pytest.raises(ModelRefused, match="outside"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("name", ["a" * 300, "a" * 5000, "b/" * 3000], ids=len)
def test_a_name_that_no_file_can_have_is_refused(sharded, name):
    """A weight_map with an over-long name is refused, although the operating system raises an error about it."""
    point_shard(sharded, f"{name}.safetensors")
    with pytest.raises((ModelRefused, MissingTensor)):
        Checkpoint.open(sharded)


def test_a_config_that_cannot_be_read_is_named(copy, monkeypatch):
    """A read that the operating system refuses is an error with the file."""

    def refused(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("edgemoe.storage.files.untrusted.open_regular", refused)
    with pytest.raises(ReadFailed, match=r"config\.json.*Permission denied"):
        Checkpoint.open(copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_no_file_may_be_a_link_that_leads_out(copy, name):
    """A link out of the directory is refused for the config, the weights and companions."""
    (copy / name).rename(copy.parent / "elsewhere")
    (copy / name).symlink_to(copy.parent / "elsewhere")
    with pytest.raises(ModelRefused, match="leads outside"):
        Checkpoint.open(copy).companions()


def test_a_snapshot_of_the_hubs_cache_may_link_to_its_own_blobs(checkpoint, tmp_path):
    """The Hub's cache links snapshots/REVISION/* to ../../blobs/*, and these links are read."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    shutil.copytree(checkpoint, blobs)
    for path in list(blobs.iterdir()):
        hashed = path.rename(blobs / f"hash-of-{path.name}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / hashed.name)
    opened = Checkpoint.open(snapshot)
    assert opened.fingerprint() == Checkpoint.open(checkpoint).fingerprint()
    assert {path.name for path in opened.companions()} >= {"config.json", "tokenizer.json"}


@pytest.mark.parametrize("suffix", ["bin", "pt"])
def test_pickled_weights_alone_are_refused(copy, suffix):
    """A checkpoint with pickled weights only is refused, with the reason in the message."""
    (copy / "model.safetensors").rename(copy / f"pytorch_model.{suffix}")
    with pytest.raises(ModelRefused, match=rf"pytorch_model\.{suffix}.*pickle"):
        Checkpoint.open(copy)


def test_pickled_shards_are_refused(sharded):
    """An index that names a pickle is refused before the file, which does not exist, is opened."""
    point_shard(sharded, "pytorch_model-00001.bin")
    with pytest.raises(ModelRefused, match="pickle"):
        Checkpoint.open(sharded)


def test_pickles_beside_safetensors_are_ignored(copy):
    """A checkpoint with both has only its safetensors read."""
    (copy / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert "lm_head.weight" in Checkpoint.open(copy).names()


def test_a_tokenizer_of_remote_code_is_refused(copy):
    """A tokenizer with auto_map needs the checkpoint's own code and is refused."""
    edit(
        copy / "tokenizer_config.json",
        lambda parsed: parsed.update(auto_map={"AutoTokenizer": ["evil.T", None]}),
    )
    with pytest.raises(ModelRefused, match="auto_map"):
        Checkpoint.open(copy)


def test_a_models_own_code_is_left_out(copy):
    """A config with auto_map is read without it; the model type decides which code runs."""
    edit(copy / "config.json", lambda parsed: parsed.update(auto_map={"AutoConfig": "evil.Config"}))
    assert "auto_map" not in Checkpoint.open(copy).config


def test_stale_entries_of_an_index(sharded):
    """A tensor that is gone is left out, and one that lies in another shard is found there."""
    want = Checkpoint.open(sharded)

    def stale(index: dict[str, dict[str, str]]) -> None:
        files = sorted(set(index["weight_map"].values()))
        other = next(file for file in files if file != index["weight_map"][FUSED])
        index["weight_map"] |= {"model.ghost": files[0], FUSED: other}

    edit(sharded / INDEX, stale)
    found = Checkpoint.open(sharded)
    assert found.names() == want.names()
    assert torch.equal(found[FUSED].read(), want[FUSED].read())


def test_index_that_names_a_missing_file(sharded):
    """A missing shard is reported by name."""
    point_shard(sharded, "model-00009-of-00005.safetensors")
    with pytest.raises(MissingTensor, match="model-00009"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": ["model.safetensors"]}])
def test_index_of_the_wrong_form_is_refused(sharded, weight_map):
    """A weight_map that does not map names to file names is refused."""
    edit(sharded / INDEX, lambda index: index.update(weight_map=weight_map))
    with pytest.raises(ModelRefused, match="weight_map"):
        Checkpoint.open(sharded)


def test_duplicate_header_keys_are_a_bad_header(copy):
    """A header with a duplicate name is refused, although the safetensors library accepts it."""
    entry = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f"{{{entry},{entry}}}".encode()
    (copy / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(BadHeader):
        Checkpoint.open(copy)


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, "9" * 10_000, "\ufeff{}", "null"])
def test_json_that_is_no_object_is_refused(copy, text):
    """Any config.json that is not an object raises ModelRefused."""
    (copy / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelRefused):
        Checkpoint.open(copy)


def test_json_of_absurd_size_is_refused_unread(copy):
    """A sparse file of 1 TiB is refused by its size, unread."""
    with (copy / "config.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelRefused, match=str(1 << 40)):
        Checkpoint.open(copy)


def test_file_cut_after_opening_is_truncated(copy):
    """A file that became shorter after `open` raises an error with its path and size."""
    opened = Checkpoint.open(copy)
    path = copy / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)
    with pytest.raises(TruncatedFile, match=r"model\.safetensors"):
        [opened[name].read() for name in opened.names()]


def test_no_checkpoint_at_all(copy, tmp_path):
    """An empty directory and a config without weights are refused, with the missing file in the message."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelRefused, match=r"config\.json"):
        Checkpoint.open(tmp_path / "empty")
    (copy / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match=r"neither model\.safetensors"):
        Checkpoint.open(copy)


def test_fingerprint_changes_with_the_source_and_not_with_its_place(copy, checkpoint):
    """A copy has the same fingerprint; a flipped bit anywhere in the weights or in a companion changes it."""
    original = Checkpoint.open(checkpoint).fingerprint()
    assert Checkpoint.open(copy).fingerprint() == original
    weights = copy / "model.safetensors"
    data = weights.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    seen = {original}
    for at in (start, (start + len(data)) // 2, len(data) - 1):
        weights.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        seen.add(Checkpoint.open(copy).fingerprint())
    weights.write_bytes(data)
    edit(copy / "tokenizer.json", lambda parsed: parsed.update(version="2.0"))
    seen.add(Checkpoint.open(copy).fingerprint())
    assert len(seen) == 5


GOOD = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "vocab_size": 151_936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": None,
}


@pytest.mark.parametrize("more", [{}, {"sliding_window": 0}, {"num_nextn_predict_layers": 0}], ids=str)
def test_a_valid_config_is_returned_unchanged(more):
    """The sizes of Qwen3-30B-A3B, with an optional value null or 0, are returned unchanged."""
    assert bounded_config(GOOD | more) == GOOD | more


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", 1_000_000_000),
        ("num_experts", 0),
        ("num_experts", -1),
        ("num_experts", "128"),
        ("num_experts", 128.0),
        ("num_experts", True),
        ("num_experts", [128]),
        ("num_hidden_layers", 1025),
        ("num_hidden_layers", None),
        ("hidden_size", 131_073),
        ("hidden_size", 10**400),
        ("num_attention_heads", 0),
        ("vocab_size", 10_000_001),
        ("head_dim", -64),
        ("max_position_embeddings", 2**62),
        ("num_experts_per_tok", 129),
        ("sliding_window", -1),
        ("sliding_window", 2**63),
        ("full_attention_interval", 0),
        ("num_nextn_predict_layers", "1"),
        ("model_type", None),
        ("model_type", ["qwen3_moe"]),
    ],
)
def test_hostile_values_are_refused_by_key_and_value(key, value):
    """Every size must be a whole number within bounds; the message contains key and value."""
    with pytest.raises(ModelRefused) as refused:
        bounded_config(GOOD | {key: value})
    assert key in str(refused.value)
    assert repr(value)[:40] in str(refused.value)
