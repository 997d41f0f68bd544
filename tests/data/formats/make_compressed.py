"""Makes the compressed-tensors checkpoints here. Needs compressed-tensors 0.20 and torch, in an environment of its own.

    python make_compressed.py DIRECTORY

Every checkpoint is one expert's three matrices, quantized and packed by the library; `expected.safetensors`
holds what the library's own decompression makes of them.
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

EXPERT = "model.layers.0.mlp.experts.0."
SHAPES = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
CASES = {
    "int4-group": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
    ),
    "int4-asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
    ),
    "int4-channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": True}),
    "int8-group": (
        "pack-quantized",
        {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": True},
    ),
    "int8-channel": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}),
    "fp8-channel": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    ),
    "fp8-tensor": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
    ),
}


def limits(weight, settings):
    """Smallest and largest weight of everything that shares a scale."""
    if settings["strategy"] == "tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    if settings["strategy"] == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    grouped = weight.view(weight.shape[0], -1, settings["group_size"])
    return grouped.amin(-1), grouped.amax(-1)


def make(directory, form, settings):
    args = QuantizationArgs(**settings)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
    compressor = BaseCompressor.load_from_registry(form)
    stored, expected = {}, {}
    for matrix, shape in SHAPES.items():
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(len(stored))) * 0.1
        scale, zero = calculate_qparams(*limits(weight, settings), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        packed = compressor.compress(state, scheme)
        stored |= {f"{EXPERT}{matrix}.{name}": value.contiguous() for name, value in packed.items()}
        expected[f"{EXPERT}{matrix}.weight"] = compressor.decompress(dict(packed), scheme)["weight"].float()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(stored, directory / "model.safetensors")
    save_file(expected, directory / "expected.safetensors")
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
    }
    (directory / "quantization_config.json").write_text(json.dumps(config, indent=1) + "\n")


for name, (form, settings) in CASES.items():
    make(Path(sys.argv[1]) / f"compressed-{name}", form, settings)
