"""Answers a request of tools/peers/compare.py by llama.cpp.

The protocol is in tools/peers/run.py. Runs under any Python that has llama-cpp-python; edgemoe need not be
installed there. The model is a GGUF, mapped into memory, on the CPU. Weight repacking makes a private copy of the
weights in another order. The request says whether it is on (`repacking`): where memory is capped it is off, because the
copy cannot be paged out to the file.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from tools.peers.warm_up import warm_ups

TOP_K_NAME = re.compile(rb"ffn_moe_topk-(\d+)")
"""llama.cpp's name of the tensor of a layer's chosen experts, int32 [experts used, tokens]."""

KV_TYPES = {"bf16": 30, "q8_0": 8, "q4_0": 2}
"""ggml's numbers of the formats of keys and values; without one llama.cpp takes fp16."""

BATCH = 512
"""Maximum prompt tokens per call: llama.cpp's default of a physical batch."""


PIECES = 32
"""Most pieces of a prompt whose state is saved."""

UNTIMED = 8
"""Tokens after a loaded state before the clock starts: they fill the page cache as a prompt would."""


class Tensor(ctypes.Structure):
    """The first fields of ggml's struct ggml_tensor: sizes and strides."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_size_t * 4),
    )


def ggml() -> ctypes.CDLL:
    """The library of tensors and memory that llama.cpp is built on."""
    return ctypes.CDLL(str(next(Path(llama_cpp.__file__).parent.glob("lib/libggml-base.*"))))


class Counts:
    """Counts the experts that a context's routers choose; `callback` goes into the context's parameters."""

    def __init__(self) -> None:
        self.of_layer: dict[int, dict[int, int]] = {}
        self._ggml = ggml()
        self._ggml.ggml_get_name.restype = ctypes.c_char_p
        self._ggml.ggml_get_data.restype = ctypes.c_void_p
        for function in (self._ggml.ggml_get_name, self._ggml.ggml_get_data):
            function.argtypes = [ctypes.c_void_p]
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._watch)

    def _watch(self, tensor: int, is_query: bool, _: Any) -> bool:
        """Counts a router's tensor; llama.cpp calls it twice a tensor.

        Returns:
            for a query, whether the callback needs the tensor's data; with the data, True: the run continues.
        """
        match = TOP_K_NAME.fullmatch(self._ggml.ggml_get_name(tensor))
        if is_query:
            return match is not None
        if match:
            self._count(int(match[1]), tensor)
        return True

    def _count(self, layer: int, tensor: int) -> None:
        shape = ctypes.cast(tensor, ctypes.POINTER(Tensor)).contents
        data = self._ggml.ggml_get_data(tensor)
        counts = self.of_layer.setdefault(layer, {})
        for token in range(shape.sizes[1]):
            row = (ctypes.c_int32 * shape.sizes[0]).from_address(data + token * shape.strides[1])
            for expert in row:
                counts[expert] = counts.get(expert, 0) + 1

    def as_rows(self, experts: int) -> list[list[int]]:
        """The counts as rows: [layer][expert] -> times chosen."""
        return [[self.of_layer[i].get(e, 0) for e in range(experts)] for i in sorted(self.of_layer)]


def load_model(request: dict[str, Any]) -> Any:
    """Maps the model; returns its handle."""
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    if hasattr(parameters, "load_mode"):
        parameters.load_mode = 1  # LLAMA_LOAD_MODE_MMAP; earlier versions have the switch use_mmap
    else:
        parameters.use_mmap = True
    parameters.use_extra_bufts = request["repacking"]
    model = llama_cpp.llama_model_load_from_file(request["model"].encode(), parameters)
    if not model:
        raise SystemExit(f"expected a GGUF that llama.cpp loads, got {request['model']}: name another")
    return model


def open_context(model: Any, request: dict[str, Any], counts: Counts | None) -> Any:
    """Opens a context of a sequence for each prompt; returns its handle.

    Each has the request's context, or room for the longest prompt and the new tokens.
    """
    parameters = llama_cpp.llama_context_default_params()
    longest = max(map(len, [*request["prompts"], *request["warm_up"]]))
    parameters.n_seq_max = len(request["prompts"])
    parameters.n_ctx = (request.get("context") or longest + request["new_tokens"]) * parameters.n_seq_max
    if request.get("saves_state"):
        parameters.n_seq_max, parameters.kv_unified = 1 + PIECES, True
    if request.get("kv_cache"):
        parameters.type_k = parameters.type_v = KV_TYPES[request["kv_cache"]]
    parameters.n_batch = parameters.n_ubatch = BATCH
    parameters.n_threads = parameters.n_threads_batch = request["threads"]
    if counts:
        parameters.cb_eval = counts.callback
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise SystemExit(f"expected a context of {parameters.n_ctx} tokens, got none: shorten the prompt")
    return context


def run_step(context: Any, batch: Any, vocabulary: int, rows: list[tuple[int, int, int]]) -> list[int]:
    """Runs rows of (token, position, sequence); returns the likeliest next token of each sequence's last row."""
    last = {sequence: i for i, (_, _, sequence) in enumerate(rows)}
    batch.n_tokens = len(rows)
    for i, (token, position, sequence) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.seq_id[i][0] = token, position, sequence
        batch.n_seq_id[i], batch.logits[i] = 1, last[sequence] == i
    if code := llama_cpp.llama_decode(context, batch):
        raise SystemExit(f"expected 0 from llama_decode, got {code}: see llama.cpp's output")
    logits = (llama_cpp.llama_get_logits_ith(context, i) for i in last.values())
    return [int(np.ctypeslib.as_array(each, (vocabulary,)).argmax()) for each in logits]


def generate(
    context: Any, vocabulary: int, prompts: list[list[int]], new_tokens: int, first: int | None = None
) -> tuple[list[float], list[int]]:
    """Runs one prompt after another, then decodes greedily, a token of each in a step.

    Args:
        context, vocabulary, prompts, new_tokens: values of the request and its model.
        first: the token after the only prompt, which the context has; None: it has none.

    Returns:
        seconds from the start to the last prompt's first token and to the end of every step, and that prompt's tokens.
    """
    if first is None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
    start = time.perf_counter()
    following = [] if first is None else [first]
    for sequence, prompt in enumerate(prompts if first is None else []):
        rows = [(token, position, sequence) for position, token in enumerate(prompt)]
        chunks = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        following.append([run_step(context, batch, vocabulary, chunk) for chunk in chunks][-1][0])
    times, tokens = [time.perf_counter() - start], [following[-1]]
    while len(tokens) < new_tokens:
        done = len(tokens) - 1
        rows = [(token, len(prompts[i]) + done, i) for i, token in enumerate(following)]
        following = run_step(context, batch, vocabulary, rows)
        times.append(time.perf_counter() - start)
        tokens.append(following[-1])
    llama_cpp.llama_batch_free(batch)
    return times, tokens


def fill_in_pieces(context: Any, prompt: list[int]) -> None:
    """Computes the keys and values of a prompt in pieces, at their positions, each of which attends to itself alone.

    Every later token attends to all of them: its time depends on how many there are. A whole prompt's attention takes
    llama.cpp half an hour for 16,384 tokens in q8_0 on two cores.
    """
    memory = llama_cpp.llama_get_memory(context)
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
    size = max(BATCH, -(-len(prompt) // PIECES))
    for piece, start in enumerate(range(0, len(prompt), size), 1):
        end = min(start + size, len(prompt))
        for first in range(start, end, BATCH):
            batch.n_tokens = min(first + BATCH, end) - first
            for i in range(batch.n_tokens):
                batch.token[i], batch.pos[i], batch.seq_id[i][0] = prompt[first + i], first + i, piece
                batch.n_seq_id[i], batch.logits[i] = 1, i == batch.n_tokens - 1
            if code := llama_cpp.llama_decode(context, batch):
                raise SystemExit(f"expected 0 from llama_decode, got {code}: see llama.cpp's output")
        llama_cpp.llama_memory_seq_cp(memory, piece, 0, -1, -1)
        llama_cpp.llama_memory_seq_rm(memory, piece, -1, -1)
    llama_cpp.llama_batch_free(batch)


def save_state(context: Any, path: str, prompt: list[int], first: int) -> None:
    """Writes a context's keys and values with its prompt and the token after it."""
    tokens = (ctypes.c_int32 * (len(prompt) + 1))(*prompt, first)
    if not llama_cpp.llama_state_save_file(context, path.encode(), tokens, len(tokens)):
        raise SystemExit(f"expected a file of llama.cpp's state at {path}, got none: free space there")


def load_state(context: Any, path: str, prompt: list[int]) -> int:
    """Reads what save_state wrote; returns the token after the prompt."""
    tokens, count = (ctypes.c_int32 * (len(prompt) + 1))(), ctypes.c_size_t()
    loaded = llama_cpp.llama_state_load_file(context, path.encode(), tokens, len(tokens), ctypes.byref(count))
    if not loaded or list(tokens[: count.value - 1]) != prompt:
        raise SystemExit(
            f"expected the state after this prompt in {path}, got none that loads: remove the file"
        )
    return int(tokens[count.value - 1])


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Serves one request."""
    llama_cpp.llama_backend_init()
    started = time.perf_counter()
    counts = Counts() if request["popularity"] else None
    model = load_model(request)
    context = open_context(model, request, counts)
    load_s = time.perf_counter() - started
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    for warm_up in warm_ups(request):
        generate(context, vocabulary, [warm_up], 2)
    state, first = request.get("state"), None
    if state and request["saves_state"]:
        fill_in_pieces(context, request["prompts"][0])
        first = request["prompts"][0][0]
    elif state:
        first = load_state(context, state, request["prompts"][0])
        generate(context, vocabulary, request["prompts"], UNTIMED, first)
        first = load_state(context, state, request["prompts"][0])
    times, tokens = generate(context, vocabulary, request["prompts"], request["new_tokens"], first)
    if state and request["saves_state"]:
        save_state(context, state, request["prompts"][0], tokens[0])
    if counts:
        return {"counts": counts.as_rows(request["experts"]), "tokens": tokens}
    return {
        "load_s": load_s,
        "token_times": times,
        "tokens": tokens,
        "versions": {
            "llama-cpp-python": llama_cpp.__version__,
            "system": llama_cpp.llama_print_system_info().decode(),
            "mmap": "on",
            "repacking": "on" if request["repacking"] else "off",
        },
    }


if __name__ == "__main__":
    print(json.dumps(answer(json.load(sys.stdin))), flush=True)
