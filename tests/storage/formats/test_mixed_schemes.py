"""Checkpoints whose matrices have several packings, and FP4, against the formats' own libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from format_data import DATA, EXPERT, opened, rewrite, settings_of
from safetensors.torch import load_file, save_file

from edgemoe.errors import MissingTensor, ModelRefused

Expected = dict[str, torch.Tensor]


def joined(directory: Path, gate_up: str, down: str) -> Expected:
    """Saves an expert's gate and up of a checkpoint in DATA, and down of another; returns the libraries' weights."""
    tensors, expected = {}, {}
    for name, parts in ((gate_up, ("gate_proj", "up_proj")), (down, ("down_proj",))):
        for found, into in (("model", tensors), ("expected", expected)):
            every = load_file(DATA / name / f"{found}.safetensors")
            into |= {
                key: each for key, each in every.items() if key.removeprefix(EXPERT).split(".")[0] in parts
            }
    save_file(tensors, directory / "model.safetensors")
    return expected


def assert_read(directory: Path, settings: dict[str, Any], expected: Expected) -> dict[str, Any]:
    """Compares all weights with the libraries', and returns them."""
    weights = opened(directory, settings)[1]
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name].read(), value.float(), rtol=2**-8, atol=1e-6)
    return weights


def two_groups(first: str, second: str) -> dict[str, Any]:
    """The config of two compressed-tensors checkpoints' schemes."""
    settings = settings_of(first)
    other = settings_of(second)["config_groups"]["group_0"]
    groups = {
        "group_0": settings["config_groups"]["group_0"] | {"targets": ["re:.*(gate|up)_proj"]},
        "group_1": other | {"targets": ["re:.*down_proj"]},
    }
    return settings | {"config_groups": groups, "format": "mixed-precision"}


@pytest.mark.covers("compressed-tensors")
@pytest.mark.parametrize(
    ("gate_up", "down"),
    [
        ("compressed-int4-group", "compressed-int8-group"),
        ("compressed-int8-group", "compressed-int4-channel"),
        ("compressed-int8-channel", "compressed-int4-asymmetric"),
    ],
)
def test_each_matrix_has_the_scheme_that_its_parts_fit(tmp_path, gate_up, down):
    """Integers of 4 and 8 bits, packed or not, in groups or rows, in one checkpoint."""
    expected = joined(tmp_path, gate_up, down)
    for group in (settings := two_groups(gate_up, down))["config_groups"].values():
        group.setdefault("format", "pack-quantized")
    weights = assert_read(tmp_path, settings, expected)
    bits = [weights[f"{EXPERT}{part}.weight"].bits for part in ("gate_proj", "down_proj")]
    assert bits == [8 if "int8-group" in name else 4 for name in (gate_up, down)]


def renamed(directory: Path, first: str, second: str) -> Expected:
    """Saves the matrix of a GPTQ checkpoint in DATA as gate, and another checkpoint's as down."""
    tensors, expected = {}, {}
    for name, part in ((first, "gate_proj"), (second, "down_proj")):
        for found, into in (("model", tensors), ("expected", expected)):
            every = load_file(DATA / name / f"{found}.safetensors")
            into |= {key.replace("gate_proj", part): each for key, each in every.items()}
    save_file(tensors, directory / "model.safetensors")
    return expected


@pytest.mark.covers("GPTQ")
@pytest.mark.parametrize("own", ["gptq-autogptq-2", "gptq-autogptq-act-order-8"])
def test_matrices_may_have_dynamic_settings(tmp_path, own):
    """GPTQ's `dynamic`: 2 bits for down, or 8 with act-order, next to 4."""
    expected, settings = renamed(tmp_path, "gptq-autogptq", own), settings_of("gptq-autogptq")
    other = {key: settings_of(own)[key] for key in ("bits", "group_size", "desc_act")}
    weights = assert_read(
        tmp_path, settings | {"dynamic": {"+:.*down_proj": other, "-:.*head": {}}}, expected
    )
    assert weights[f"{EXPERT}down_proj.weight"].bits == other["bits"]
    assert (weights[f"{EXPERT}down_proj.weight"].group is None) == other["desc_act"]
    with pytest.raises(MissingTensor):
        opened(tmp_path, settings)


def test_packings_that_fit_alike_are_refused(tmp_path):
    """96 inputs have three groups of 32 or of 33: none is guessed. Settings for the same numbers change nothing."""
    expected, settings = renamed(tmp_path, "gptq-autogptq", "gptq-autogptq"), settings_of("gptq-autogptq")
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("g_idx")])
    alike = {"+:a": {"group_size": 33}, "+:b": {"bits": 4}}
    with pytest.raises(ModelRefused, match="one packing"):
        opened(tmp_path, settings | {"dynamic": alike})
    assert_read(tmp_path, settings | {"dynamic": {"+:b": {"bits": 4}}}, expected)


@pytest.mark.covers("compressed-tensors")
@pytest.mark.parametrize("form", ["nvfp4-pack-quantized", "mxfp4-pack-quantized"])
def test_fp4_is_what_the_library_decompresses(tmp_path, form):
    """E2M1 with scales of E4M3 and a factor, or powers of two, packed and read back by compressed-tensors."""
    torch.manual_seed(0)
    nvidia = form.startswith("nv")
    group = 16 if nvidia else 32
    kind = {"num_bits": 4, "type": "float", "symmetric": True, "group_size": group}
    args = QuantizationArgs(**kind, strategy="tensor_group" if nvidia else "group")
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.load_from_registry(form)
    tensors, expected = {}, {}
    for part, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        weight = torch.randn(shape) * 0.02
        largest = weight.view(shape[0], -1, group).abs().amax(-1)
        state = {"weight": weight, "weight_scale": torch.exp2(torch.ceil(torch.log2(largest / 6)))}
        if nvidia:
            factor = torch.tensor([2000.0])
            state |= {
                "weight_scale": (largest / 6 * factor).to(torch.float8_e4m3fn).float(),
                "weight_global_scale": factor,
            }
        packed = compressor.compress(state, scheme)
        expected[f"{EXPERT}{part}.weight"] = compressor.decompress(packed, scheme)["weight"]
        tensors |= {f"{EXPERT}{part}.{name}": each for name, each in packed.items() if name != "weight"}
        tensors[f"{EXPERT}{part}.input_global_scale"] = torch.ones(1)
    save_file(
        {name: each.data.contiguous() for name, each in tensors.items()}, tmp_path / "model.safetensors"
    )
    settings = {"quant_method": "compressed-tensors", "format": form}
    settings["config_groups"] = {"group_0": json.loads(scheme.model_dump_json())}
    weights = opened(tmp_path, settings)[1]
    if not nvidia:
        weights = {name: each for name, each in weights.items() if not name.endswith("input_global_scale")}
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        # The library computes in bf16.
        torch.testing.assert_close(weights[name].read(), value.float(), rtol=2**-7, atol=0)
        assert (weights[name].group, weights[name].type) == (None, form[:5].upper())
    rewrite(tmp_path, lambda tensors: tensors.update({f"{EXPERT}up_proj.weight_scale": torch.ones(32, 5)}))
    with pytest.raises(MissingTensor, match="weight_scale"):
        opened(tmp_path, settings)
