"""Makes the GPTQ, AWQ and AutoRound checkpoints here. Needs auto-round 0.16 and its dependencies, in an environment
of its own; works offline.

    python make_autoround.py DIRECTORY

A small random Qwen3-MoE is quantized by rounding to nearest and exported by the library in every packing. Of each
checkpoint the first expert is kept; `expected.safetensors` holds the same expert of the library's own `fake`
export, whose weights are quantized and dequantized again.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

import torch
from auto_round import AutoRound
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

EXPERT = "model.layers.0.mlp.experts.0."
CASES = {
    "gptq": ("auto_gptq", True),
    "gptq-asymmetric": ("auto_gptq", False),
    "awq": ("auto_awq", False),
    "autoround-gptq": ("auto_round:auto_gptq", False),
    "autoround-gptqmodel": ("auto_round:gptqmodel", False),
    "autoround-awq": ("auto_round:auto_awq", False),
}


def a_model():
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def a_tokenizer():
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", pad_token="t0")


def export(model, form, symmetric):
    """The first expert's tensors and the quantization_config of an export."""
    with tempfile.TemporaryDirectory() as directory:
        rounded = AutoRound(
            copy.deepcopy(model),
            a_tokenizer(),
            bits=4,
            group_size=32,
            sym=symmetric,
            iters=0,
            disable_opt_rtn=True,
            device_map="cpu",
        )
        rounded.quantize_and_save(directory, format=form)
        (weights,) = Path(directory).rglob("model.safetensors")
        config = json.loads((weights.parent / "config.json").read_text()).get("quantization_config")
        return {n: t.clone() for n, t in load_file(weights).items() if n.startswith(EXPERT)}, config


model, out = a_model(), Path(sys.argv[1])
fake = {symmetric: export(model, "fake", symmetric)[0] for symmetric in (True, False)}
for name, (form, symmetric) in CASES.items():
    tensors, config = export(model, form, symmetric)
    (out / name).mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / name / "model.safetensors")
    save_file({n: t.float() for n, t in fake[symmetric].items()}, out / name / "expected.safetensors")
    (out / name / "quantization_config.json").write_text(json.dumps(config, indent=1) + "\n")
