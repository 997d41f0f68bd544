"""Settings of a quantization_config that change weights or inputs are read, or refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from format_data import DATA, EXPERT, opened, rewrite, settings_of
from safetensors.torch import load_file, save_file

from edgemoe.errors import MissingTensor, ModelRefused
from edgemoe.storage.files.tensors import StoredTensors
from edgemoe.storage.formats import open_weights

ROTATION = {"apply": [{"targets": ["Linear"], "location": "input"}, {"location": "weight_input"}]}
FOLDED = {"apply": [{"location": "weight_output"}, {"location": "weight_input", "inverse": True}]}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("compressed-int4-group", {"transform_config": {"config_groups": {"R3": ROTATION}}}),
        ("compressed-int4-group", {"transform_config": {"config_groups": {"R3": {}}}}),
        ("compressed-int4-group", {"transform_config": {"config_groups": ["R3"]}}),
        ("compressed-int4-group", {"transform_config": ["hadamard"]}),
        ("compressed-int4-group", {"sparsity_config": {"format": "sparse-24-bitmask"}}),
        ("compressed-fp8-channel", {"rotation": "hadamard"}),
        ("gptq", {"rotation": "hadamard"}),
        ("awq", {"smooth": 0.5}),
        ("autoround-gptq", {"act_bits": 8}),
        ("autoround-gptq", {"hadamard_config": {"block_size": 32}}),
    ],
)
def test_a_setting_that_is_not_known_is_refused_by_name(name, change):
    """Nothing that may change weights or inputs is passed over."""
    (key,) = change
    with pytest.raises(ModelRefused, match=key):
        opened(DATA / name, settings_of(name) | change)


@pytest.mark.parametrize("where", ["group", "weights"])
def test_the_parts_of_a_scheme_are_known_too(where):
    """Keys within config_groups count as well."""
    settings = settings_of("compressed-int4-group")
    group = settings["config_groups"]["group_0"]
    (group if where == "group" else group["weights"])["hadamard"] = True
    with pytest.raises(ModelRefused, match="hadamard"):
        opened(DATA / "compressed-int4-group", settings)


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_formats_without_data_refuse_too(tmp_path, method):
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": method, "rotation": "hadamard"}}
    with pytest.raises(ModelRefused, match="rotation"):
        open_weights(config, StoredTensors.open(tmp_path))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("compressed-int4-group", {"transform_config": {"config_groups": {"R1": FOLDED}}}),
        ("compressed-int4-group", {"transform_config": {}, "sparsity_config": {}, "rotation": None}),
        (
            "compressed-int4-group",
            {"sparsity_config": {"format": "dense"}, "kv_cache_scheme": {"num_bits": 8}},
        ),
        ("gptq", {"damp_percent": 0.05, "meta": {"quantizer": "gptqmodel:5"}, "pack_dtype": "int32"}),
        ("gptq", {"format": "gptq"}),
    ],
)
def test_notes_and_empty_settings_pass(name, change):
    """Notes about how a checkpoint was made change nothing; nor do rotations that the weights have already."""
    before, after = (opened(DATA / name, settings_of(name) | more)[1] for more in ({}, change))
    part = f"{EXPERT}gate_proj.weight"
    assert torch.equal(before[part].read(), after[part].read())


def test_settings_in_a_file_of_their_own_are_named(tmp_path):
    """Weights that a config.json does not explain are refused with the file that does."""
    directory = Path(shutil.copytree(DATA / "gptq", tmp_path / "gptq"))
    (directory / "quantize_config.json").write_text(json.dumps(settings_of("gptq")))
    with pytest.raises(ModelRefused, match=r"quantize_config\.json"):
        opened(directory, None)


def changed(tmp_path: Path, name: str, edit: Any, **settings: Any) -> torch.Tensor:
    """An expert's weights after a change of a checkpoint's tensors."""
    directory = Path(shutil.copytree(DATA / name, tmp_path / name))
    rewrite(directory, edit)
    return opened(directory, settings_of(name) | settings)[1][f"{EXPERT}gate_proj.weight"].read()


def without(part: str) -> Any:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(part)]:
            del tensors[name]

    return edit


def test_gptq_without_zero_points_is_symmetric(tmp_path):
    """All left out they are the middle of the codes; asymmetric weights need them."""
    stored = load_file(DATA / "gptq" / "model.safetensors")
    left_out = changed(tmp_path, "gptq", without(".qzeros"))
    scales = stored[f"{EXPERT}gate_proj.scales"].float().T.repeat_interleave(32, 1)
    codes = (left_out / scales).round()
    assert (codes.min(), codes.max()) >= (torch.tensor(-8.0), torch.tensor(-8.0))
    torch.testing.assert_close(
        left_out, opened(DATA / "gptq", settings_of("gptq"))[1][f"{EXPERT}gate_proj.weight"].read()
    )
    shutil.rmtree(tmp_path / "gptq")
    with pytest.raises(MissingTensor, match="qzeros"):
        changed(tmp_path, "gptq", without(".qzeros"), sym=False)


def test_compressed_zero_points_of_0_or_left_out(tmp_path):
    """Symmetric weights may have zero points of 0, packed or not; an asymmetric scheme may have none at all."""
    want = opened(DATA / "compressed-int4-group", settings_of("compressed-int4-group"))[1][
        f"{EXPERT}gate_proj.weight"
    ].read()

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            zeros = torch.zeros_like(tensors[name], dtype=torch.int8)
            tensors[name.replace("weight_scale", "weight_zero_point")] = zeros

    assert torch.equal(changed(tmp_path / "a", "compressed-int4-group", add), want)
    settings = settings_of("compressed-int4-group")
    settings["config_groups"]["group_0"]["weights"]["symmetric"] = False
    assert torch.equal(
        changed(tmp_path / "b", "compressed-int4-group", lambda tensors: None, **settings), want
    )


def test_asymmetric_int8(tmp_path):
    """A zero point is subtracted before scaling; one matrix without it is damage where others have theirs."""
    weight, scale = torch.tensor([[5, -7], [100, -128]], dtype=torch.int8), torch.tensor([[0.5], [2.0]])
    zero = torch.tensor([[3], [-1]], dtype=torch.int8)
    tensors = {"a.weight": weight, "a.weight_scale": scale, "a.weight_zero_point": zero}
    save_file(tensors, tmp_path / "model.safetensors")
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    found = opened(tmp_path, settings)[1]
    assert set(found) == {"a.weight"}
    assert torch.equal(found["a.weight"].read(), torch.tensor([[1.0, -5.0], [202.0, -254.0]]))
    tensors |= {"b.weight": weight.clone(), "b.weight_scale": scale.clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MissingTensor, match=r"b\.weight_zero_point"):
        opened(tmp_path, settings)
