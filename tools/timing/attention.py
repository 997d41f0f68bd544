"""Times attention in one layer of Qwen3-30B-A3B's shape: edgemoe's kernel by each path, and torch's operator.

    python -m tools.timing.attention [--tokens 64 512 2048] [--rounds 9]
    python -m tools.timing.attention --tokens 1 --behind 16384 [--heads 16 --kv-heads 16] [--kv-cache q8_0]

Prints the median and best time of a layer in milliseconds. edgemoe's time includes norms, rotation and the KV writes;
torch's is scaled_dot_product_attention of a prompt alone, in the dtype that edgemoe.layers.attention uses on this
machine. With --behind the tokens come after others, whose keys and values are random.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import paths
from edgemoe.kernels.native.attention import NativeAttention
from edgemoe.kernels.native.attention_rows import LayerKV
from edgemoe.kv.formats import KINDS, KVFormat
from edgemoe.kv.rows import encode
from edgemoe.layers.attend import attend
from tools.command_line import make_parser, positive

DIM = 128


def with_torch(options: argparse.Namespace, tokens: int) -> Callable[[], object]:
    """A call of torch's operator for a prompt of random vectors."""
    heads = options.heads, options.kv_heads, options.kv_heads
    query, keys, values = (torch.randn(n, tokens, DIM).bfloat16() for n in heads)
    return lambda: attend(query, keys, values, DIM**-0.5, None)


def native_kernel(options: argparse.Namespace, tokens: int) -> Callable[[], object]:
    """A call of edgemoe's kernel for random projections."""
    norm, form = (torch.ones(DIM).bfloat16(), 1e-6), KVFormat(options.kv_cache, options.kv_cache)
    attention = NativeAttention(options.heads, options.kv_heads, DIM, (norm, norm), DIM**-0.5)
    qkv = torch.randn(tokens, (options.heads + 2 * options.kv_heads) * DIM).bfloat16()
    rotation = torch.ones(tokens, DIM).bfloat16(), torch.zeros(tokens, DIM).bfloat16()
    stored = (torch.randn(options.kv_heads, options.behind + tokens, DIM).bfloat16() for _ in range(2))
    keys, values = (encode(options.kv_cache, each) for each in stored)
    return lambda: attention(qkv, rotation, LayerKV(keys, values, options.behind, form), None)


def kernels(options: argparse.Namespace) -> Iterator[tuple[str, Callable[..., Callable[[], object]]]]:
    """Yields each kernel's name and its maker of calls; selects the instruction set before it yields."""
    if native.available():
        rows = paths.ROWS[0] if options.tokens == [1] else paths.ROWS[-1]
        for path in reversed(paths.candidates("attention", rows)):
            paths.choose(paths.forced(path))
            yield f"native, {path}", native_kernel
    if not options.behind and options.kv_cache == KINDS[0]:
        yield "torch", with_torch


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser("tools.timing.attention", __doc__)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[64, 512, 2048], help="of a call")
    parser.add_argument("--behind", type=int, default=0, help="tokens before them; default: 0")
    parser.add_argument("--heads", type=positive, default=32, help="default: 32")
    parser.add_argument("--kv-heads", type=positive, default=4, help="default: 4")
    parser.add_argument("--kv-cache", choices=KINDS, default=KINDS[0], help="default: bf16")
    parser.add_argument("--rounds", type=positive, default=9)
    given = parser.parse_args(argv)
    print(f"{torch.get_num_threads()} threads\n| kernel | tokens | median | best |\n|---|---|---|---|")
    for name, make in kernels(given):
        for tokens in given.tokens:
            run, found = make(given, tokens), []
            for _ in range(given.rounds + 1):
                start = time.perf_counter()
                run()
                found.append(time.perf_counter() - start)
            found = sorted(found[1:])  # the first warms up
            row = f"{1e3 * found[len(found) // 2]:.2f} | {1e3 * found[0]:.2f}"
            print(f"| {name} | {tokens} | {row} |", flush=True)


if __name__ == "__main__":
    main()
