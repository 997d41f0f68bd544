"""Makes the GPTQ checkpoints here that begin with `gptq-autogptq`. Needs auto-gptq 0.7.1, in an environment of its
own: made with torch 2.13, transformers 4.51.3, peft 0.15.2, datasets 3.6.0, gekko 1.3.3; offline and without a GPU.

    python make_autogptq.py DIRECTORY

Every checkpoint is one matrix of an expert, quantized by the library's own GPTQ from random inputs and packed by its
QuantLinear; `expected.safetensors` holds what that layer makes of the unit vectors: the weights it computes with.
"""

import json
import sys
from pathlib import Path

import torch
from auto_gptq import BaseQuantizeConfig
from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear
from auto_gptq.quantization import GPTQ
from safetensors.torch import save_file

MATRIX = "model.layers.0.mlp.experts.0.gate_proj"
ROWS, COLUMNS = 32, 96
CASES = {
    "gptq-autogptq": {"bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "gptq-autogptq-act-order": {"bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    "gptq-autogptq-act-order-8": {"bits": 8, "group_size": 32, "desc_act": True, "sym": True},
    "gptq-autogptq-2": {"bits": 2, "group_size": 32, "desc_act": False, "sym": True},
}


def quantized(settings):
    """The library's layer for a random matrix."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False).half()
    gptq = GPTQ(linear)
    gptq.quantizer.configure(settings.bits, perchannel=True, sym=settings.sym)
    # Inputs of unlike size, so that act-order has something to order.
    inputs = torch.randn(256, COLUMNS) * torch.rand(COLUMNS)
    gptq.add_batch(inputs, None)
    scales, zeros, order = gptq.fasterquant(
        percdamp=settings.damp_percent, group_size=settings.group_size, actorder=settings.desc_act
    )
    layer = QuantLinear(settings.bits, settings.group_size, COLUMNS, ROWS, bias=False)
    layer.pack(linear, scales, zeros, order)
    return layer


# The library waits for a GPU at the end of every matrix, whether or not it has one.
torch.cuda.synchronize = lambda: None
for name, case in CASES.items():
    settings = BaseQuantizeConfig(**case)
    layer = quantized(settings)
    directory = Path(sys.argv[1]) / name
    directory.mkdir(parents=True, exist_ok=True)
    stored = {f"{MATRIX}.{part}": value.contiguous() for part, value in layer.state_dict().items()}
    save_file(stored, directory / "model.safetensors")
    weight = layer(torch.eye(COLUMNS).half()).T.float().contiguous()
    save_file({f"{MATRIX}.weight": weight}, directory / "expected.safetensors")
    (directory / "quantization_config.json").write_text(json.dumps(settings.to_dict(), indent=1) + "\n")
