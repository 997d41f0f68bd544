"""Times tokens of several families with layers of the real models' sizes and random weights, all experts resident.

    python -m tools.timing.families [glm-4.5-air ...] [--layers 6] [--experts 16] [--after 64 512] [--tokens 60]

A layer has fewer experts than the model's, since a token reads its chosen ones alone, at 4 bits per weight, and the
dense weights at 8 bits with the vocabulary of --vocab. "By modules" are tokens that transformers' modules compute, in
turn with the others. The bound is the time in which this machine reads the bytes of a token from memory, at the best
rate of all rows, measured as in `edgemoe bench`. Stores are made in --place, and stay there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from edgemoe.bench.bandwidth import read_memory
from edgemoe.bench.synthetic.tokenizer import save_tokenizer
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.experts.step import Study
from edgemoe.kv.step import Segment, Step
from edgemoe.models.conversion.run import convert_checkpoint
from edgemoe.policy.settings import RunSettings
from edgemoe.storage.store.manifest import DENSE_BITS, MANIFEST_NAME
from tools.command_line import make_parser, positive

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        }
        | {"head_dim": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "glm-4.5-air": (
        "glm4_moe",
        {
            "hidden_size": 4096,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
        }
        | {"head_dim": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "intermediate_size": 10944}
        | {"first_k_dense_replace": 1, "attention_bias": True},
    ),
    "minimax-m2": (
        "minimax_m2",
        {"hidden_size": 3072, "intermediate_size": 1536, "num_attention_heads": 48, "num_key_value_heads": 8}
        | {"head_dim": 128, "num_experts_per_tok": 8},
    ),
    "ernie-4.5-21b-a3b": ("ernie4_5_moe", {"moe_k": 6}),
    "gpt-oss-20b": ("gpt_oss", {"num_experts_per_tok": 4}),
    "qwen3-next-80b": ("qwen3_next", {"num_experts_per_tok": 10}),
    "qwen3.6-35b-a3b": (
        "qwen3_5_moe_text",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
        }
        | {"head_dim": 256, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 512}
        | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
        | {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 1408,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        }
        | {"q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        | {"v_head_dim": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "intermediate_size": 10944}
        | {"first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "glm-4.7-flash": (
        "glm4_moe_lite",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 1536,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
        }
        | {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64}
        | {"v_head_dim": 256, "n_shared_experts": 1, "num_experts_per_tok": 4, "intermediate_size": 10240}
        | {"n_group": 1, "topk_group": 1},
    ),
    "nemotron-3-nano": (
        "nemotron_h",
        {
            "hidden_size": 2688,
            "moe_intermediate_size": 1856,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
        }
        | {"head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}
        | {"moe_shared_expert_intermediate_size": 3712, "num_experts_per_tok": 6}
        | {
            "layers_block_type": [
                "linear_attention",
                "moe",
                "full_attention",
                "moe",
                "linear_attention",
                "moe",
            ]
        },
    ),
    "gemma-4-26b-a4b": (
        "gemma4_text",
        {
            "hidden_size": 2816,
            "moe_intermediate_size": 704,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        }
        | {"head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
        | {"intermediate_size": 2112, "enable_moe_block": True, "top_k_experts": 8, "sliding_window": 1024}
        | {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0},
    ),
    "lfm2-8b-a1b": (
        "lfm2_moe",
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 1792,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
        | {"num_experts_per_tok": 4, "num_dense_layers": 2, "intermediate_size": 7168}
        | {"layer_types": ["conv", "conv", "full_attention", "conv", "conv", "conv"]},
    ),
}
"""Model -> its family's model_type, and what a layer's sizes come of."""

TURN = 5
"""Tokens of one way of computing before the other one's turn."""


def make_store(name: str, place: Path, layers: int, experts: int, vocab: int, dense_bits: int) -> Path:
    """Converts a model with random weights, unless it has been converted before."""
    store = place / f"{name}-{layers}-{experts}-{vocab}-{dense_bits}"
    if (store / MANIFEST_NAME).exists():
        return store
    config = config_of(name, layers, experts, vocab)
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).state_dict()
    source = place / f"{name}-source"
    source.mkdir(parents=True, exist_ok=True)
    pool = torch.randn(1 << 22).mul(0.02).bfloat16()
    tensors = {key: _filled(each, pool) for key, each in shapes.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    save_tokenizer(vocab, source)
    convert_checkpoint(source, store, max_level=4, layout="auto", dense_bits=dense_bits)
    (source / "model.safetensors").unlink()
    return store


def config_of(name: str, layers: int, experts: int, vocab: int) -> Any:
    """transformers' config of a model with fewer layers and experts."""
    model_type, sizes = MODELS[name]
    known = AutoConfig.for_model(model_type).to_dict()
    counts = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    number = next(key for key in counts if key in known)
    common = {"num_hidden_layers": layers, "vocab_size": vocab, "max_position_embeddings": 4096}
    return AutoConfig.for_model(model_type, **{**sizes, **common, number: experts})


def _filled(like: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    if like.ndim < 2:
        return torch.ones(like.shape, dtype=like.dtype)
    times = -(-like.numel() // len(pool))
    return pool.repeat(times)[: like.numel()].view(like.shape)


def measure(store: StoreModel, after: int, tokens: int) -> dict[str, float]:
    """Milliseconds a token after a prompt, as it runs and by transformers' modules in turn; bytes, and their rate."""
    settings = RunSettings(levels=(4,), exact=True)
    plan = store.plan(vram_limit=None, settings=settings, context=after + 4 * tokens + 8)
    rate = read_memory()
    arms: dict[str, list[float]] = {"ms": [], "by modules": []}
    with Engine(store, plan, settings) as engine:
        engine.fill()
        sequence = engine.sequences.new()
        engine.prefill(sequence, [(7 * i + 5) % store.shape.vocab for i in range(after)])
        for turn in range(2 * tokens // TURN + 2):
            name = ("ms", "by modules")[turn % 2]
            with engine.studied(Study(modules=name != "ms")):
                for i in range(TURN):
                    start = time.perf_counter()
                    engine.step(Step((Segment(sequence, ((11 * i + turn) % store.shape.vocab,)),)))
                    if turn > 1:
                        arms[name].append(1000 * (time.perf_counter() - start))
        rate = max(rate, read_memory())
    read = store.dense_bytes_per_token + store.form.bytes_at(4) * store.shape.top_k * _routed(store)
    return {name: median(values) for name, values in arms.items()} | {"bytes": read, "rate": rate}


def _routed(store: StoreModel) -> int:
    """Layers with experts."""
    return store.shape.experts // store.shape.experts_per_layer


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser("tools.timing.families", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--experts", type=positive, default=16, help="experts of a layer")
    parser.add_argument("--after", type=positive, nargs="+", default=[64, 512], help="tokens of the prompt")
    parser.add_argument("--tokens", type=positive, default=60)
    parser.add_argument("--vocab", type=positive, default=32000)
    parser.add_argument("--dense-bits", type=int, choices=DENSE_BITS, default=8, help="of dense weights")
    parser.add_argument("--place", type=Path, required=True, help="where stores are made")
    given = parser.parse_args(argv)
    rows = list[tuple[str, int, dict[str, float]]]()
    for name in given.models or MODELS:
        place = make_store(name, given.place, given.layers, given.experts, given.vocab, given.dense_bits)
        for after in given.after:
            rows.append((name, after, measure(StoreModel.open(place), after, given.tokens)))
    rate = max(times["rate"] for _, _, times in rows)
    print(f"{rate / 1e9:.1f} GB/s from memory, {given.layers} layers", end="\n\n")
    print(
        "| model | after | MB | ms per token | by modules | bound | share of the bound |\n|---|---|---|---|---|---|---|"
    )
    for name, after, times in rows:
        bound = 1000 * times["bytes"] / rate
        cells = " | ".join(f"{each:.2f}" for each in (times["ms"], times["by modules"], bound))
        share = 100 * bound / times["ms"]
        print(f"| {name} | {after} | {times['bytes'] / 1e6:.0f} | {cells} | {share:.0f} % |")


if __name__ == "__main__":
    main()
