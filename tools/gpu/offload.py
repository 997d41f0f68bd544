"""Times transformers with accelerate's CPU offload, as a child of tools.gpu.bench: one line of JSON on stdout.

    python -m tools.gpu.offload --like tiny --layers 2 --memory 1000000 --device cpu --prompt-tokens 8 --new-tokens 2

The model has a preset's shape and random weights in bf16. Whole layers up to --memory bytes are on the device; the
others stay in RAM, and accelerate copies a layer's weights to the device every time the layer runs. On --device cpu
nothing is offloaded: that only tests the command.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import torch
import transformers

from edgemoe.bench.synthetic.workload import PRESETS, Shape
from tools.command_line import make_parser, positive, two_or_more


def random_model(shape: Shape) -> Any:
    """Makes the model in RAM, in bf16; the weights repeat a few million random numbers, which costs no copy time."""
    import accelerate
    from accelerate.utils import set_module_tensor_to_device

    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(shape.config(), dtype=torch.bfloat16)
    pool = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    for name, parameter in list(model.named_parameters()):
        repeated = pool.repeat(-(-parameter.numel() // pool.numel()))[: parameter.numel()]
        set_module_tensor_to_device(model, name, "cpu", value=repeated.view(parameter.shape))
    return model.eval()


def offloaded(model: Any, device: str, memory: int) -> Any:
    """Puts up to `memory` bytes of whole layers on the device; the others stay in RAM."""
    if device == "cpu":
        return model
    import accelerate

    whole, limits = sorted(model._no_split_modules), {0: memory, "cpu": 1 << 50}
    places = accelerate.infer_auto_device_map(model, max_memory=limits, no_split_module_classes=whole)
    return accelerate.dispatch_model(model, places)


def token_times(model: Any, device: str, prompt: torch.Tensor, new_tokens: int) -> list[float]:
    """Decodes greedily after `prompt`, int64 [1, T]; returns the seconds from the start to each token."""
    cache = transformers.DynamicCache(config=model.config)
    times: list[float] = []
    ids, start = prompt.to(device), time.perf_counter()
    with torch.inference_mode():
        while len(times) < new_tokens:
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1].argmax(-1, keepdim=True).to(device)
            ids.cpu()
            times.append(time.perf_counter() - start)
    return times


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.gpu.offload", __doc__)
    parser.add_argument("--like", choices=sorted(PRESETS), required=True)
    parser.add_argument("--layers", type=positive, required=True)
    parser.add_argument("--memory", type=positive, required=True, help="bytes of weights on the device")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--prompt-tokens", type=positive, required=True)
    parser.add_argument("--new-tokens", type=two_or_more, required=True, help="2 or more")
    given = parser.parse_args(argv)
    shape = replace(PRESETS[given.like], layers=given.layers)
    model = offloaded(random_model(shape), given.device, given.memory)
    prompt = torch.randint(shape.vocab, (1, given.prompt_tokens), generator=torch.Generator().manual_seed(0))
    token_times(model, given.device, prompt[:, :8], 2)  # first-call costs of the process
    times = token_times(model, given.device, prompt, given.new_tokens)
    places = getattr(model, "hf_device_map", {})
    answer = {
        "layers": given.layers,
        "memory_bytes": given.memory,
        "modules_in_ram": sum(place == "cpu" for place in places.values()),
        "ttft_s": times[0],
        "tpot_s": (times[-1] - times[0]) / (len(times) - 1),
        "versions": {name: metadata.version(name) for name in ("accelerate", "torch", "transformers")},
    }
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
