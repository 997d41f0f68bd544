"""Times the expert kernels that work here: 128 experts of Qwen3-30B-A3B's shape, each met once a round.

    python -m tools.timing.kernels [--tokens 1 16 64] [--levels 4 2 8] [--rounds 7]

Prints, by kernel, level and tokens at one expert, the median and best time of an expert in microseconds. As many
experts share a call as do while a model runs, and there are more than any cache holds: their bytes come from memory.
Where the processor has AVX-512 VNNI, edgemoe's own kernel is timed without it as well.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import torch

from edgemoe.experts.layer import BATCH_ROWS
from edgemoe.kernels.activation import Activation
from edgemoe.kernels.base import Part
from edgemoe.kernels.native import library as native
from edgemoe.kernels.registry import Compute, kernels_for
from storage.base import Blocks
from storage.record import MatrixSpec, RecordGeometry
from tools.counts import positive

GEOMETRY = RecordGeometry((MatrixSpec.of("gate_up", 1536, 2048), MatrixSpec.of("down", 2048, 768)), 8)


MOST_TOGETHER = 8
"""Experts that a token of this model has."""


def random_experts(way: Compute, count: int) -> list[Blocks]:
    """Experts at level 8 with random codes, and scales and centres of about 0.01."""
    generator, experts = np.random.default_rng(0), []
    for _ in range(count):
        blocks = {}
        for kind in way.form(GEOMETRY, way.layout, way.layout).kinds:
            block = generator.integers(0, 256, kind.size, dtype=np.uint8)
            if kind.level == 2:
                block[: GEOMETRY.parameter_bytes] = 0x3C
            blocks[kind.name] = block.data
        experts.append(blocks)
    return experts


def times(way: Compute, experts: list[Blocks], level: int, tokens: int, rounds: int) -> list[float]:
    """Seconds of an expert in each round, ascending."""
    kernel = way.kernel(GEOMETRY, way.layout)
    together = min(max(BATCH_ROWS // tokens, 1), MOST_TOGETHER)
    x = torch.randn(tokens, 2048).to(torch.bfloat16)
    x = x.expand(together, -1) if tokens == 1 else x.repeat(together, 1)
    activation, found, out = (
        Activation.gated("silu"),
        [],
        torch.empty(together * tokens, 2048, dtype=torch.bfloat16),
    )
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for at in range(0, len(experts), together):
            parts = [Part(blocks, 8, level, tokens) for blocks in experts[at : at + together]]
            rows = len(parts) * tokens
            kernel.forward(x[:rows], parts, activation, out[:rows])
        found.append((time.perf_counter() - start) / len(experts))
    return sorted(found[1:])  # the first warms up


def names(way: Compute) -> Iterator[str]:
    """Of the kernels_for in which a kernel can run here; each is the one in use when its name comes."""
    if way.name != "native":
        yield way.name
        return
    if native.use_vnni(True):
        yield f"{way.name}, VNNI"
    native.use_vnni(False)
    yield f"{way.name}, AVX2"
    native.use_vnni(True)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[1, 16, 64], help="at one expert")
    parser.add_argument("--levels", type=int, nargs="+", choices=(8, 4, 2), default=[4, 2, 8])
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--experts", type=positive, default=128)
    given = parser.parse_args(argv)
    print(
        f"{torch.get_num_threads()} threads\n| kernel | level | tokens | median | best |\n|---|---|---|---|---|"
    )
    for way in kernels_for():
        experts = random_experts(way, given.experts)
        for name in names(way):
            for level, tokens in product(given.levels, given.tokens):
                found = times(way, experts, level, tokens, given.rounds)
                row = f"{1e6 * found[len(found) // 2]:.0f} | {1e6 * found[0]:.0f}"
                print(f"| {name} | {level} | {tokens} | {row} |", flush=True)


if __name__ == "__main__":
    main()
