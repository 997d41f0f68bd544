"""Times a prompt's attention in one layer of Qwen3-30B-A3B's shape: edgemoe's kernel and torch's operator.

    python -m tools.timing.attention [--tokens 64 512 2048] [--rounds 9]

Prints the median and best time of a layer in milliseconds. edgemoe's time includes norms, rotation and the KV writes;
torch's is scaled_dot_product_attention alone, in the dtype that edgemoe.layers.attention uses on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import paths
from edgemoe.kernels.native.attention import NativeAttention
from edgemoe.layers.attention import attend
from tools.command_line import make_parser, positive

HEADS, KV_HEADS, DIM = 32, 4, 128


def with_torch(tokens: int) -> Callable[[], object]:
    """A call of torch's operator for a prompt of random vectors."""
    query, keys, values = (torch.randn(n, tokens, DIM).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS))
    return lambda: attend(query, keys, values, DIM**-0.5, None)


def native_kernel(tokens: int) -> Callable[[], object]:
    """A call of edgemoe's kernel for a prompt of random projections."""
    norm = torch.ones(DIM).bfloat16(), 1e-6
    attention = NativeAttention(HEADS, KV_HEADS, DIM, (norm, norm), DIM**-0.5)
    qkv = torch.randn(tokens, (HEADS + 2 * KV_HEADS) * DIM).bfloat16()
    rotation = torch.ones(tokens, DIM).bfloat16(), torch.zeros(tokens, DIM).bfloat16()
    keys, values = (torch.zeros(KV_HEADS, tokens, DIM).bfloat16() for _ in range(2))
    return lambda: attention(qkv, rotation, keys, values, 0, None)


def kernels() -> Iterator[tuple[str, Callable[[int], Callable[[], object]]]]:
    """Yields each kernel's name and its maker of calls; selects the instruction set before it yields."""
    if native.available():
        for path in reversed(paths.candidates("attention", paths.ROWS[-1])):
            paths.choose(paths.forced(path))
            yield f"native, {path}", native_kernel
    yield "torch", with_torch


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser("tools.timing.attention", __doc__)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[64, 512, 2048], help="of the prompt")
    parser.add_argument("--rounds", type=positive, default=9)
    given = parser.parse_args(argv)
    print(f"{torch.get_num_threads()} threads\n| kernel | tokens | median | best |\n|---|---|---|---|")
    for name, make in kernels():
        for tokens in given.tokens:
            run, found = make(tokens), []
            for _ in range(given.rounds + 1):
                start = time.perf_counter()
                run()
                found.append(time.perf_counter() - start)
            found = sorted(found[1:])  # the first warms up
            row = f"{1e3 * found[len(found) // 2]:.2f} | {1e3 * found[0]:.2f}"
            print(f"| {name} | {tokens} | {row} |", flush=True)


if __name__ == "__main__":
    main()
