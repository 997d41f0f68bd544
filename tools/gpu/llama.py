"""Times llama.cpp on a GPU, with the experts of some layers on the CPU so that the rest fits: one line of JSON.

    python -m tools.synthetic.gguf --like qwen3-30b-a3b w1.gguf
    python -m tools.gpu.llama --gguf w1.gguf --cpu-layers 18 --threads 16

Every dense weight is on the GPU, and so are the experts of all layers but the first --cpu-layers, as llama.cpp's
--n-cpu-moe leaves them. The prompt runs once before it is timed. Needs llama-cpp-python, built with CUDA.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from edgemoe.machine.nvml import process_bytes
from tools.command_line import make_parser, positive, two_or_more

ON_CPU = r"blk\.({})\.ffn_(up|down|gate)_(ch|)exps"
"""The tensors that stay in RAM: llama.cpp's own pattern, for a choice of layers."""


class Override(ctypes.Structure):
    """llama.cpp's struct llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("type", ctypes.c_void_p))


def on_cpu(layers: int, ram: int | None) -> Any:
    """The overrides that keep the experts of the first layers in a kind of memory; the last one ends the list."""
    names = "|".join(map(str, range(layers)))
    first = [Override(ON_CPU.format(names).encode(), ram)] if layers else []
    return (Override * (len(first) + 1))(*first, Override(None, None))


def load(path: Path, cpu_layers: int) -> tuple[Any, Any]:
    """Loads the model; returns its handle and what must outlive it."""
    import llama_cpp

    from tools.peers.llama_child import ggml

    library = ggml()
    library.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    overrides = on_cpu(cpu_layers, library.ggml_backend_cpu_buffer_type())
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 999
    parameters.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        raise SystemExit(f"expected a GGUF that llama.cpp loads, got {path}: name another")
    return model, overrides


def gpu_bytes() -> int | None:
    """Bytes of the first GPU that this process has, by the driver's count."""
    try:
        import pynvml
    except ImportError:
        return None
    pynvml.nvmlInit()
    return process_bytes(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)).removeprefix("GPU-"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("tools.gpu.llama", __doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--cpu-layers", type=int, default=0, help="layers whose experts stay in RAM")
    parser.add_argument("--threads", type=positive, default=16)
    parser.add_argument("--prompt-tokens", type=positive, default=128)
    parser.add_argument("--new-tokens", type=two_or_more, default=32)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    given = parse(argv)
    import llama_cpp

    from tools.peers.llama_child import generate, open_context

    llama_cpp.llama_backend_init()
    start = time.perf_counter()
    model, overrides = load(given.gguf, given.cpu_layers)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    random = Random(0)
    prompt = [random.randrange(3, vocabulary) for _ in range(given.prompt_tokens)]
    request = {"prompts": [prompt], "warm_up": [], "new_tokens": given.new_tokens, "threads": given.threads}
    context = open_context(model, request, None)
    load_s = time.perf_counter() - start
    generate(context, vocabulary, [prompt], 4)
    times, _ = generate(context, vocabulary, [prompt], given.new_tokens)
    gaps = sorted(after - before for before, after in itertools.pairwise(times))
    answer = {
        "cpu_layers": given.cpu_layers,
        "threads": given.threads,
        "load_s": load_s,
        "ttft_s": times[0],
        "tpot_s": (times[-1] - times[0]) / (len(times) - 1),
        "tpot_p50_s": gaps[len(gaps) // 2],
        "vram_bytes": gpu_bytes(),
        "versions": {
            "llama-cpp-python": llama_cpp.__version__,
            "system": llama_cpp.llama_print_system_info().decode(),
        },
    }
    del overrides
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
