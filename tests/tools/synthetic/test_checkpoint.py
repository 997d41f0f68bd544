"""tools/synthetic/checkpoint.py: checkpoints that transformers and convert read."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.storage.convert.checkpoint import Checkpoint
from tools.synthetic import checkpoint


@pytest.mark.e2e
def test_transformers_and_convert_read_every_weight(tmp_path, capsys):
    """No tensor is missing or superfluous, the weights are counted, and conversion succeeds."""
    model = tmp_path / "model"
    assert checkpoint.main(["--like", "tiny", "--shard-gb", "0.0001", str(model)]) == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    loaded, report = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert sum(p.numel() for p in loaded.parameters()) == weights
    assert len(list(model.glob("*.safetensors"))) > 3
    convert_checkpoint(model, tmp_path / "store", max_level=8, layout="cpu-generic", dense_bits=16)


@pytest.mark.e2e
@pytest.mark.folders
def test_equal_arguments_give_equal_weights(tmp_path):
    """Equal arguments give equal files, in which no two experts' tensors are equal."""
    for name in ("a", "b"):
        checkpoint.main(["--like", "tiny", str(tmp_path / name)])
    assert Checkpoint.open(tmp_path / "a").fingerprint() == Checkpoint.open(tmp_path / "b").fingerprint()
    (file,) = (tmp_path / "a").glob("*.safetensors")
    experts = [t for n, t in load_file(file).items() if "experts" in n]
    assert len({t.view(-1)[:32].float().sum().item() for t in experts}) == len(experts)


def test_too_small_vocabulary_is_refused(tmp_path, capsys):
    """A vocabulary below the tokenizer's minimum exits 2 with the option's name."""
    assert checkpoint.main(["--like", "tiny", "--vocab", "9", str(tmp_path / "x")]) == 2
    assert "--vocab" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "value"), [("--layers", "0"), ("--vocab", "-1"), ("--shard-gb", "0")])
def test_sizes_of_nothing_are_refused(tmp_path, capsys, name, value):
    """A size of 0 or less exits 2 with the option's name before a file is written."""
    with pytest.raises(SystemExit) as stopped:
        checkpoint.main(["--like", "tiny", name, value, str(tmp_path / "x")])
    assert stopped.value.code == 2
    assert name in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("limit", [1, 10_000, 10**9])
def test_shards_contain_every_tensor_once(limit):
    """Shards of any size contain all tensors in order."""
    shape = checkpoint.PRESETS["tiny"]
    files = checkpoint.shards(shape, limit)
    names = [name for file in files for name in file]
    assert names == [name for name, _ in checkpoint.tensor_shapes(shape)]
    assert len(set(names)) == len(names)
