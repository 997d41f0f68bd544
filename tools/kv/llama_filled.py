"""Times decode tokens of llama.cpp behind a long context, by the type of keys and values, as tools/kv/filled.py does.

    PYTHON -m tools.kv.llama_filled GGUF [--context 32768] [--filled 0 16384] [--types f16 q8_0] [--tokens 24]

Runs under any Python that has llama-cpp-python. The context is filled synthetically: the state of a few tokens, as
llama.cpp writes it, is repeated until it has as many tokens as are wanted, and read back. The tokens that follow are
random, the same in every row, and the median of the last two thirds is printed. The model is mapped into memory, on the
CPU, with flash attention and without weight repacking, whose copy cannot be paged out.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import struct
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import llama_cpp

TYPES = {"f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}
"""ggml's numbers of types."""

PART = 64
"""Tokens whose state is repeated."""


class State:
    """What llama.cpp writes of one sequence's KV, taken apart."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, form: str) -> int:
        """The next number."""
        (value,) = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return int(value)

    def repeated(self, tokens: int) -> bytes:
        """The state with `tokens` tokens at positions from 0 on: rows come again and again.

        Raises:
            SystemExit: the state is of another version.
        """
        made = [struct.pack("<I", self.take("I"))]  # streams, one here
        cells = self.take("I")
        made.append(struct.pack("<I", tokens))
        for _ in range(cells):
            self.take("i")
            self._at += 4 * self.take("I")
        made += [struct.pack("<iI", position, 0) for position in range(tokens)]
        transposed, layers = self.take("I"), self.take("I")
        made.append(struct.pack("<II", transposed, layers))
        if transposed or cells != PART:
            raise SystemExit(f"expected {PART} cells of rows, got {cells}: use flash attention")
        for _ in range(2 * layers):
            kind, row = self.take("i"), self.take("Q")
            rows = self._data[self._at : self._at + cells * row]
            self._at += cells * row
            made += [struct.pack("<iQ", kind, row), (rows * -(-tokens // cells))[: tokens * row]]
        if self._at != len(self._data):
            raise SystemExit(f"expected a state of {self._at} bytes, got {len(self._data)}: another version")
        return b"".join(made)


def decode(context: Any, tokens: Sequence[int], first: int) -> None:
    """Runs tokens of sequence 0 at positions from `first` on."""
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.seq_id[i][0] = token, first + i, 0
        batch.n_seq_id[i], batch.logits[i] = 1, i + 1 == len(tokens)
    if code := llama_cpp.llama_decode(context, batch):
        raise SystemExit(f"expected 0 from llama_decode, got {code}: see llama.cpp's output")
    llama_cpp.llama_synchronize(context)
    llama_cpp.llama_batch_free(batch)


def fill(context: Any, tokens: int, draw: random.Random, vocabulary: int) -> None:
    """Fills an empty context."""
    decode(context, [draw.randrange(vocabulary) for _ in range(PART)], 0)
    size = llama_cpp.llama_state_seq_get_size(context, 0)
    buffer = (ctypes.c_uint8 * size)()
    if llama_cpp.llama_state_seq_get_data(context, buffer, size, 0) != size:
        raise SystemExit("expected the state of a sequence, got less: see llama.cpp's output")
    made = State(bytes(buffer)).repeated(tokens)
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    whole = (ctypes.c_uint8 * len(made)).from_buffer_copy(made)
    if llama_cpp.llama_state_seq_set_data(context, whole, len(made), 0) != len(made):
        raise SystemExit("expected a state that llama.cpp reads, got another: see its output")


def open_context(model: Any, kind: str, given: argparse.Namespace) -> Any:
    """Opens a context with keys and values of a type."""
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx, parameters.n_batch, parameters.n_ubatch, parameters.n_seq_max = (
        given.context,
        512,
        512,
        1,
    )
    parameters.n_threads = parameters.n_threads_batch = given.threads
    parameters.type_k = parameters.type_v = TYPES[kind]
    if hasattr(parameters, "flash_attn_type"):
        parameters.flash_attn_type = 1  # LLAMA_FLASH_ATTN_TYPE_ENABLED
    else:
        parameters.flash_attn = True
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise SystemExit(f"expected a context with {kind}, got none: see llama.cpp's output")
    return context


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row a type and length."""
    parser = argparse.ArgumentParser(prog="tools.kv.llama_filled", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--filled", type=int, nargs="+", default=[0, 16384])
    parser.add_argument("--types", nargs="+", default=["f16", "q8_0"], choices=list(TYPES))
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(argv)
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    if hasattr(parameters, "load_mode"):
        parameters.load_mode = 1
    else:
        parameters.use_mmap = True
    parameters.use_extra_bufts = False
    model = llama_cpp.llama_model_load_from_file(given.model.encode(), parameters)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    for kind in given.types:
        for filled in given.filled:
            context, draw, seconds = open_context(model, kind, given), random.Random(filled), []
            if filled:
                fill(context, filled, draw, vocabulary)
            for index in range(given.tokens):
                start = time.perf_counter()
                decode(context, [draw.randrange(vocabulary)], filled + index)
                seconds.append(time.perf_counter() - start)
            took = median(seconds[given.tokens // 3 :])
            print(f"| llama.cpp, {kind} | {filled} | {1000 * took:.1f} ms |", flush=True)
            llama_cpp.llama_free(context)
    return 0


if __name__ == "__main__":
    sys.exit(main())
