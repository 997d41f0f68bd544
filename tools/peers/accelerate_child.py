"""transformers with accelerate's disk offload as a child of tools/peers/compare.py: the protocol of compare_peers_run.

The request's model is a checkpoint; `memory` is what may stay in RAM, in bytes, or null for all. What does not fit is
offloaded by accelerate to a folder beside the checkpoint, whole modules at a time, and read when its module runs.
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
    """The model in bf16, its layers placed by accelerate within the memory allowed."""
    placed: dict[str, Any] = {}
    if request["memory"] is not None:
        placed = {
            "device_map": "auto",
            "max_memory": {"cpu": request["memory"]},
            "offload_folder": folder,
        }
    return transformers.AutoModelForCausalLM.from_pretrained(
        request["model"], dtype=torch.bfloat16, **placed
    ).eval()


def generate(model: Any, prompt: list[int], new_tokens: int) -> tuple[list[float], list[int]]:
    """Greedy tokens after a prompt: seconds since the start at which each was known, and their ids."""
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


def counting(model: Any) -> tuple[list[list[int]], list[Any]]:
    """Counts [layer][expert] of what routers choose from now on, and the hooks that do it."""
    modules = [module for _, module in model.named_modules() if hasattr(module, "_apply_gate")]
    counts = [[0] * module.num_experts for module in modules]

    def counter(of: list[int]) -> Any:
        def note(module: Any, given: tuple[Any, ...]) -> None:
            for expert in given[1].flatten().tolist():
                of[expert] += 1

        return note

    hooks = [m.register_forward_pre_hook(counter(of)) for m, of in zip(modules, counts, strict=True)]
    return counts, hooks


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Serves one request."""
    torch.set_num_threads(request["threads"])
    with tempfile.TemporaryDirectory(dir=Path(request["model"]).parent) as folder:
        started = time.perf_counter()
        model = load(request, folder)
        load_s = time.perf_counter() - started
        if request["popularity"]:
            counts, _ = counting(model)
            _, tokens = generate(model, request["prompt"], request["new_tokens"])
            return {"counts": counts, "tokens": tokens}
        for warm_up in warm_ups(request):
            generate(model, warm_up, 2)
        times, tokens = generate(model, request["prompt"], request["new_tokens"])
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
