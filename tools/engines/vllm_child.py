"""Answers a request of tools/engines/compare.py by vLLM, in vLLM's own environment.

vLLM multiplies packed integers of experts on GPUs and on CPUs with AMX alone. On other CPUs `dequantize` computes such
experts in bf16, from the integers and scales as vLLM's own loader has placed them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as wna16,
)

from tools.engines.protocol import Answers, Request, serve

_SCORED = 10
"""Answers scored at a time: their log-probabilities are Python objects."""


def weights(packed: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """bf16 weights [E, N, K] of int32 words [E, N, K * bits / 32] and scales [E, N, K / group]."""
    raw, mask = packed.contiguous().view(torch.uint8), (1 << bits) - 1
    codes = torch.stack([(raw >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)
    wide = scale.float().repeat_interleave(codes.shape[-1] // scale.shape[-1], -1)
    return ((codes.float() - (1 << (bits - 1))) * wide).to(torch.bfloat16)


def dequantize() -> None:
    """Makes vLLM compute experts of compressed-tensors as bf16 weights."""

    def choose(**_: Any) -> tuple[Any, Any]:
        return WNA16MoEBackend.EMULATION, None

    def process(method: Any, layer: Any) -> None:
        for name in ("w13", "w2"):
            packed, scale = getattr(layer, f"{name}_weight_packed"), getattr(layer, f"{name}_weight_scale")
            found = weights(packed.data, scale.data, method.num_bits)
            layer.register_parameter(f"{name}_weight", torch.nn.Parameter(found, requires_grad=False))
            packed.data, scale.data = packed.data.new_empty(0), scale.data.new_empty(0)
        plain = UnquantizedFusedMoEMethod(method.moe)
        plain.process_weights_after_loading(layer)
        method.moe_kernel, method.moe_quant_config = plain.moe_kernel, plain.moe_quant_config

    wna16.select_wna16_moe_backend = choose
    wna16.CompressedTensorsWNA16MoEMethod.process_weights_after_loading = process


def answer(request: Request) -> Answers:
    """Generates greedy answers, and the log-probabilities of the given ones."""
    if not torch.cuda.is_available() and not torch.cpu._is_amx_tile_supported():
        dequantize()
    llm: Any = LLM(
        request.model,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=request.context,
        max_num_seqs=8,
        max_logprobs=-1,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        skip_tokenizer_init=True,  # else the text of every token of every row is looked up
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=request.new_tokens, stop_token_ids=request.stop, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in request.prompts]
    texts = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, greedy, use_tqdm=False)]
    pairs = list(zip(request.prompts, request.answers, strict=True))
    rows: list[np.ndarray] = []
    for start in range(0, len(pairs), _SCORED):
        rows += score(llm, pairs[start : start + _SCORED], request.vocab)
    return Answers(texts, np.stack(rows))


def score(llm: Any, pairs: list[tuple[list[int], list[int]]], vocab: int) -> list[np.ndarray]:
    """Log-probabilities before each token of the second of each pair, which follows the first: float32 [vocab] each."""
    scored = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False
    )
    wholes = [{"prompt_token_ids": prompt + given} for prompt, given in pairs]
    rows = []
    for (prompt, given), out in zip(pairs, llm.generate(wholes, scored, use_tqdm=False), strict=True):
        found = out.prompt_logprobs
        for position in range(len(prompt), len(prompt) + len(given)):
            part = slice(found.start_indices[position], found.end_indices[position])
            row = np.full(vocab, -np.inf, np.float32)
            row[found.token_ids[part]] = found.logprobs[part]
            rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(serve(answer))
