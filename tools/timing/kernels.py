"""Times the expert kernels of this machine on 128 experts of Qwen3-30B-A3B's shape, each computed once a round.

    python -m tools.timing.kernels [--tokens 1 16 64] [--levels 4 2 8] [--rounds 7]

Prints the median and best time of an expert in microseconds, by kernel, level and tokens an expert. A call computes as
many experts as in a model's step; together they are larger than any CPU cache, so their bytes come from memory.
edgemoe's kernel is timed by each of its paths that the processor has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import product

import torch

from edgemoe.kernels.activation import Activation
from edgemoe.kernels.base import BATCH_ROWS, Part, Rows
from edgemoe.kernels.native import paths
from edgemoe.kernels.probe import random_experts
from edgemoe.kernels.registry import Compute, kernels_for
from edgemoe.storage.base import Blocks
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from tools.command_line import make_parser, positive

GEOMETRY = RecordGeometry((MatrixSpec.of("gate_up", 1536, 2048), MatrixSpec.of("down", 2048, 768)), 8)

TOP_K = 8
"""Experts of a token of this model."""


def times(path: Compute, experts: list[Blocks], level: int, tokens: int, rounds: int) -> list[float]:
    """Times every round after the first; returns the seconds of an expert, ascending."""
    kernel = path.kernel(GEOMETRY, path.layout)
    together = min(max(BATCH_ROWS // tokens, 1), TOP_K)
    x = torch.randn(tokens, 2048).to(torch.bfloat16)
    x = x if tokens == 1 else x.repeat(together, 1)
    activation, found = Activation.gated("silu"), list[float]()
    out = torch.empty(together * tokens, 2048, dtype=torch.bfloat16)
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for at in range(0, len(experts), together):
            parts = [Part(blocks, 8, level, tokens) for blocks in experts[at : at + together]]
            rows = len(parts) * tokens
            kernel.forward(Rows(x[:rows]), parts, activation, out[:rows])
        found.append((time.perf_counter() - start) / len(experts))
    return sorted(found[1:])  # the first warms up


def variants(path: Compute) -> Iterator[str]:
    """Yields the name of each instruction set that a kernel has here, and selects it before it yields."""
    if path.name != "native":
        yield path.name
        return
    for name in reversed(paths.candidates("experts", paths.ROWS[-1])):
        paths.choose(paths.forced(name))
        yield f"{path.name}, {name}"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser("tools.timing.kernels", __doc__)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 16, 64], help="of an expert")
    parser.add_argument("--levels", type=int, nargs="+", choices=(8, 4, 2), default=[4, 2, 8])
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--experts", type=positive, default=128)
    given = parser.parse_args(argv)
    print(
        f"{torch.get_num_threads()} threads\n| kernel | level | tokens | median | best |\n|---|---|---|---|---|"
    )
    for path in kernels_for():
        experts = random_experts(path.form(GEOMETRY, path.layout, path.layout), GEOMETRY, given.experts)
        for name in variants(path):
            for level, tokens in product(given.levels, given.tokens):
                found = times(path, experts, level, tokens, given.rounds)
                row = f"{1e6 * found[len(found) // 2]:.0f} | {1e6 * found[0]:.0f}"
                print(f"| {name} | {level} | {tokens} | {row} |", flush=True)


if __name__ == "__main__":
    main()
