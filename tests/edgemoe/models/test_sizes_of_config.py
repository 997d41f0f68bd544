"""A config.json whose sizes contradict the checkpoint's tensors is refused before any work."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from folder_models import folder_config

from edgemoe.errors import EdgemoeError
from edgemoe.layers.skeleton import skeleton
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.models.runnable import check_sizes
from edgemoe.storage.convert.checkpoint import Checkpoint
from edgemoe.storage.convert.config import bounded_config
from edgemoe.storage.files.header import header_bytes, tensor_bytes
from edgemoe.storage.formats.plain import PlainWeight

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about values

CASES = {
    "qwen3_moe": {"moe_intermediate_size": 48, "num_experts": 9, "num_hidden_layers": 3, "vocab_size": 199},
    "glm4_moe": {"num_hidden_layers": 3, "n_shared_experts": 2},
    "deepseek_v2": {"kv_lora_rank": 16, "first_k_dense_replace": 2},
    "qwen3_5_moe_text": {"linear_num_value_heads": 8, "head_dim": 32, "layer_types": ["full_attention"] * 4},
}
"""model_type -> keys of config.json, each with a value that is not the checkpoint's."""


@cache
def config_of(model_type: str) -> dict[str, Any]:
    """transformers' config of a small model."""
    return folder_config(model_type).to_dict() | {"model_type": model_type}


@cache
def weights_of(model_type: str) -> bytes:
    """A safetensors file with all tensors of that model, named as its modules, of zeros."""
    model = skeleton(Path(), bounded_config(config_of(model_type)))
    specs = {name: ("BF16", tuple(value.shape)) for name, value in model.state_dict().items()}
    return header_bytes(specs, {}, 8) + bytes(sum(tensor_bytes(*spec) for spec in specs.values()))


def checkpoint_of(directory: Path, model_type: str, **others: Any) -> Path:
    """Writes the weights of a small model, and its config.json with other values for some keys."""
    (directory / "config.json").write_text(json.dumps(config_of(model_type) | others))
    (directory / "model.safetensors").write_bytes(weights_of(model_type))
    return directory


@pytest.mark.parametrize("model_type", CASES)
def test_the_checkpoints_own_config_is_accepted(tmp_path, model_type):
    """The cases below start from a checkpoint whose sizes agree."""
    check_sizes(Checkpoint.open(checkpoint_of(tmp_path, model_type)), tmp_path, 16)


@pytest.mark.parametrize(
    ("model_type", "key"), [(model_type, key) for model_type, keys in CASES.items() for key in keys]
)
def test_another_size_is_refused_before_any_work(tmp_path, monkeypatch, model_type, key):
    """No weight is read and no file is written for a config with one wrong size."""
    monkeypatch.setattr(PlainWeight, "read", lambda self: pytest.fail("a weight was read"))
    source = checkpoint_of(tmp_path, model_type, **{key: CASES[model_type][key]})
    with pytest.raises(EdgemoeError):
        convert_checkpoint(source, tmp_path / "store", max_level=None, layout="cpu-generic", dense_bits=16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_layer_of_the_model_is_none_for_multi_token_prediction(tmp_path):
    """With one layer less in config.json the last one would be left out; a real layer of that kind is."""
    shorter = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    source = checkpoint_of(tmp_path, "glm4_moe", **shorter)
    with pytest.raises(EdgemoeError, match="num_hidden_layers"):
        check_sizes(Checkpoint.open(source), source, 16)
    model = skeleton(Path(), bounded_config(config_of("glm4_moe")))
    specs = {name: ("BF16", tuple(value.shape)) for name, value in model.state_dict().items()}
    specs |= {"model.layers.3.eh_proj.weight": ("BF16", (64, 128))}
    data = bytes(sum(tensor_bytes(*spec) for spec in specs.values()))
    (source / "model.safetensors").write_bytes(header_bytes(specs, {}, 8) + data)
    check_sizes(Checkpoint.open(source), source, 16)
