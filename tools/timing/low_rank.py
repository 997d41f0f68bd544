"""Compares ways to factor an error, and ways to store the factors' numbers in some three bits.

    python -m tools.timing.low_rank [--rows 768] [--columns 2048] [--rank 32] [--rounds 5] [--json]

The error is of normal numbers, as errors of quantization nearly are. Printed are, for the exact decomposition and for
torch's randomized one, the share of the squared error that the product takes away and the median of the times; and for
each form of three bits its bits a number and the share of the numbers' square that it loses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median

import torch

from edgemoe.storage.compensators.index import GROUP
from edgemoe.storage.compensators.low_rank import dequantize3, factor, quantize3, refit
from tools.command_line import make_parser, positive


@dataclass(frozen=True)
class Decomposition:
    """A way to factor an error.

    Args:
        name: of the way.
        taken: share of the squared error that the product takes away.
        seconds: median.
    """

    name: str
    taken: float
    seconds: float


@dataclass(frozen=True)
class ThreeBits:
    """A form of numbers.

    Args:
        name: of the form.
        bits: a number, scales included.
        lost: share of the numbers' square.
    """

    name: str
    bits: float
    lost: float


def decompositions(error: torch.Tensor, rank: int, rounds: int) -> list[Decomposition]:
    """Factors an error [N, K] in each way."""
    ways: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
        "exact": partial(factor, error, rank),
        "torch.svd_lowrank, 2 iterations": partial(_randomized, error, rank, 2),
        "torch.svd_lowrank, 6 iterations": partial(_randomized, error, rank, 6),
    }
    found = []
    for name, way in ways.items():
        times = []
        for _ in range(rounds):
            torch.manual_seed(0)
            start = time.perf_counter()
            u, v = way()
            times.append(time.perf_counter() - start)
        found.append(Decomposition(name, 1 - _share(error - u.t() @ v, error), median(times)))
    return found


def _randomized(error: torch.Tensor, rank: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    u, s, v = torch.svd_lowrank(error, rank, niter=steps)
    return (u * s).t(), v.t()


def forms(values: torch.Tensor) -> list[ThreeBits]:
    """Stores numbers [rows, columns] in each form of three bits."""
    columns = values.shape[1]
    ours = dequantize3(*quantize3(values), columns)
    grouped = values.view(len(values), -1, GROUP)
    low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
    scale = ((high - low) / 7).bfloat16().float()
    low = low.bfloat16().float()
    other = (((grouped - low) / scale).round().clamp(0, 7) * scale + low).flatten(1)
    return [
        ThreeBits("one scale of either sign", 3 + 16 / GROUP, _share(ours - values, values)),
        ThreeBits("a scale and a minimum", 3 + 32 / GROUP, _share(other - values, values)),
    ]


def taken_back(error: torch.Tensor, rank: int) -> float:
    """The share of what quantizing both factors costs that fitting v to the quantized u takes back."""
    u, v = factor(error, rank)
    u_read = dequantize3(*quantize3(u), error.shape[0])

    def left(v: torch.Tensor) -> float:
        return _share(error - u_read.t() @ dequantize3(*quantize3(v), error.shape[1]), error)

    plain = left(v)
    return (plain - left(refit(u_read, error))) / (plain - _share(error - u.t() @ v, error))


def _share(part: torch.Tensor, whole: torch.Tensor) -> float:
    return float(part.square().sum(dtype=torch.float64) / whole.square().sum(dtype=torch.float64))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tool; returns its exit code."""
    parser = make_parser("tools.timing.low_rank", __doc__)
    parser.add_argument("--rows", type=positive, default=768)
    parser.add_argument("--columns", type=positive, default=2048, help=f"a multiple of {GROUP}")
    parser.add_argument("--rank", type=positive, default=32)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", action="store_true")
    given: argparse.Namespace = parser.parse_args(arguments)
    if given.columns % GROUP or given.rank > min(given.rows, given.columns):
        parser.error(f"expected columns in groups of {GROUP} and a rank of at most the smaller side")
    error = torch.randn(given.rows, given.columns, generator=torch.Generator().manual_seed(0))
    ways, stored = decompositions(error, given.rank, given.rounds), forms(error)
    back = taken_back(error, given.rank)
    if given.json:
        rows = {"decompositions": [asdict(way) for way in ways], "forms": [asdict(form) for form in stored]}
        print(json.dumps(rows | {"taken_back": back}))
        return 0
    for way in ways:
        print(f"{way.name}: takes {way.taken:.4f} of the square, {way.seconds:.3f} s")
    for form in stored:
        print(f"{form.name}: {form.bits:g} bits, loses {form.lost:.4f} of the square")
    print(f"v fitted again takes back {back:.2f} of what the codes cost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
