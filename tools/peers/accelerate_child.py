"""Answers a request of tools/peers/compare.py by transformers with accelerate's disk offload.

The protocol is in tools/peers/run.py. The request's model is a checkpoint; `memory` is the bytes that may stay in
RAM, or null for the whole model. accelerate offloads whole modules that do not fit to a folder next to the checkpoint,
and reads each when it runs.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from tools.peers.warm_up import warm_ups


def load(request: dict[str, Any], folder: str) -> Any:
    """Loads the model in bf16; accelerate places its layers within `memory`."""
    placed: dict[str, Any] = {}
    if request["memory"] is not None:
        placed = {"device_map": "auto", "max_memory": {"cpu": request["memory"]}, "offload_folder": folder}
    return transformers.AutoModelForCausalLM.from_pretrained(
        request["model"], dtype=torch.bfloat16, **placed
    ).eval()


def generate(model: Any, prompt: list[int], new_tokens: int) -> tuple[list[float], list[int]]:
    """Decodes greedily: seconds from the start to each token, and the tokens' ids."""
    cache = transformers.DynamicCache(config=model.config)
    times: list[float] = []
    tokens: list[int] = []
    start = time.perf_counter()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        while len(tokens) < new_tokens:
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(ids))
            times.append(time.perf_counter() - start)
    return times, tokens


def counting(model: Any) -> list[list[int]]:
    """Hooks the routers of a model; the result [layer][expert] counts the experts that they choose."""
    modules = [module for _, module in model.named_modules() if hasattr(module, "_apply_gate")]
    counts = [[0] * module.num_experts for module in modules]

    def counter(layer: list[int]) -> Any:
        def count(module: Any, inputs: tuple[Any, ...]) -> None:
            for expert in inputs[1].flatten().tolist():
                layer[expert] += 1

        return count

    for module, layer in zip(modules, counts, strict=True):
        module.register_forward_pre_hook(counter(layer))
    return counts


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Serves one request."""
    torch.set_num_threads(request["threads"])
    (prompt,) = request["prompts"]
    with tempfile.TemporaryDirectory(dir=Path(request["model"]).parent) as folder:
        started = time.perf_counter()
        model = load(request, folder)
        load_s = time.perf_counter() - started
        if request["popularity"]:
            counts = counting(model)
            _, tokens = generate(model, prompt, request["new_tokens"])
            return {"counts": counts, "tokens": tokens}
        for warm_up in warm_ups(request):
            generate(model, warm_up, 2)
        times, tokens = generate(model, prompt, request["new_tokens"])
    return {
        "load_s": load_s,
        "token_times": times,
        "tokens": tokens,
        "device_map": {name: str(place) for name, place in getattr(model, "hf_device_map", {}).items()},
        "versions": {
            "accelerate": accelerate.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))), flush=True)
