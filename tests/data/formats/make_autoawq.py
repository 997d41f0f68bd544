"""Makes the AWQ checkpoints here that begin with `awq-autoawq`. Needs autoawq 0.2.9, in an environment of its own:
made with torch 2.13, transformers 4.51.3, datasets 3.6.0; offline and without a GPU.

    python make_autoawq.py DIRECTORY

Every checkpoint is one matrix of an expert, quantized and packed by the last step of the library's quantizer, without
the search for scales before it, which changes weights and not the format. `expected.safetensors` holds what the
library's own functions make of the packed tensors, and `codes.safetensors` its 4-bit numbers.
"""

import json
import sys
from pathlib import Path

import torch
from awq.models._config import AwqConfig
from awq.quantize.quantizer import AwqQuantizer
from awq.utils.packing_utils import dequantize_gemm, reverse_awq_order, unpack_awq
from safetensors.torch import save_file

MATRIX = "model.layers.0.mlp.experts.0.gate_proj"
ROWS, COLUMNS = 32, 128
GROUPS = {"awq-autoawq": 32, "awq-autoawq-128": 128}


def quantized(settings):
    """The library's layer for a random matrix."""
    torch.manual_seed(0)
    expert = torch.nn.ModuleDict({"gate_proj": torch.nn.Linear(COLUMNS, ROWS, bias=False)})
    # Its constructor wants a whole model and texts to run it on.
    quantizer = AwqQuantizer.__new__(AwqQuantizer)
    quantizer.w_bit, quantizer.group_size = settings.w_bit, settings.q_group_size
    quantizer.zero_point, quantizer.version = settings.zero_point, settings.version
    quantizer._apply_quant(expert, {"gate_proj": expert["gate_proj"]})
    return expert["gate_proj"]


for name, group in GROUPS.items():
    settings = AwqConfig(q_group_size=group)
    layer = quantized(settings)
    directory = Path(sys.argv[1]) / name
    directory.mkdir(parents=True, exist_ok=True)
    stored = {f"{MATRIX}.{part}": value.contiguous() for part, value in layer.state_dict().items()}
    save_file(stored, directory / "model.safetensors")
    weight = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, layer.w_bit, layer.group_size)
    save_file({f"{MATRIX}.weight": weight.T.float().contiguous()}, directory / "expected.safetensors")
    codes, _ = reverse_awq_order(*unpack_awq(layer.qweight, layer.qzeros, layer.w_bit), layer.w_bit)
    codes = (codes & 15).to(torch.uint8).T.contiguous()
    save_file({f"{MATRIX}.weight": codes}, directory / "codes.safetensors")
    config = settings.to_transformers_dict()
    (directory / "quantization_config.json").write_text(json.dumps(config, indent=1) + "\n")
