"""tools/synthetic/checkpoint.py: a checkpoint that transformers and convert take for a real one."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from edgemoe.models.resolve import convert_checkpoint
from storage.checkpoint import Checkpoint
from tools.synthetic import checkpoint as synthesize_checkpoint


def test_transformers_finds_every_weight_and_convert_every_expert(tmp_path, capsys):
    """No tensor is missing or left over, the weights are counted, and a store can be made of it."""
    model = tmp_path / "model"
    assert synthesize_checkpoint.main(["--like", "tiny", "--shard-gb", "0.0001", str(model)]) == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    loaded, report = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert sum(p.numel() for p in loaded.parameters()) == weights
    assert len(list(model.glob("*.safetensors"))) > 3
    convert_checkpoint(model, tmp_path / "store", max_level=8, layout="cpu-generic", dense_bits=16)


def test_the_same_arguments_give_the_same_weights(tmp_path):
    """And every tensor has weights of its own."""
    for name in ("a", "b"):
        synthesize_checkpoint.main(["--like", "tiny", str(tmp_path / name)])
    assert Checkpoint.open(tmp_path / "a").fingerprint() == Checkpoint.open(tmp_path / "b").fingerprint()
    (file,) = (tmp_path / "a").glob("*.safetensors")
    experts = [t for n, t in load_file(file).items() if "experts" in n]
    assert len({t.view(-1)[:32].float().sum().item() for t in experts}) == len(experts)


def test_a_vocabulary_too_small_for_a_tokenizer_exits_2(tmp_path, capsys):
    """With a sentence."""
    assert synthesize_checkpoint.main(["--like", "tiny", "--vocab", "9", str(tmp_path / "x")]) == 2
    assert "--vocab" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("--layers", "0"), ("--vocab", "-1"), ("--shard-gb", "0")])
def test_sizes_of_nothing_are_named(tmp_path, capsys, name, value):
    """They exit 2 before anything is written."""
    with pytest.raises(SystemExit) as stopped:
        synthesize_checkpoint.main(["--like", "tiny", name, value, str(tmp_path / "x")])
    assert stopped.value.code == 2
    assert name in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [1, 10_000, 10**9])
def test_shards_hold_every_tensor_once(limit):
    """Whatever their size."""
    shape = synthesize_checkpoint.PRESETS["tiny"]
    files = synthesize_checkpoint.shards(shape, limit)
    names = [name for file in files for name in file]
    assert names == [name for name, _ in synthesize_checkpoint.tensor_shapes(shape)]
    assert len(set(names)) == len(names)
