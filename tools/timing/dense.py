"""Times products of one row with dense weights of 8 bits, by this build and by others in turn, and prints GB/s.

    python -m tools.timing.dense [--shapes 2048x2048 ...] [--against OTHER.so ...] [--rounds 6]

The matrices of a shape take more than the processor's caches, and are read one after another. A shape is ROWSxCOLS, or
HEADSxROWSxCOLS: matrices of heads with a scale for each column, as keys of latent attention have; with a last "r", for
each row. Another build is a compiled library with the same structures; if its bits differ the tool stops.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native.signatures import SIGNATURES
from edgemoe.kernels.native.structures import DenseHeads, DenseWeight
from edgemoe.machine.cpu import identity
from tools.command_line import make_parser, positive

SHAPES = (
    *("768x2048", "5120x768", "2048x2048", "14336x4096", "2048x5120", "3072x6144", "4096x12288"),
    *("20x512x192", "20x256x512r", "16x512x128", "16x128x512r"),
)
"""Matrices of GLM-4.7-Flash, DeepSeek-V2-Lite, MiniMax-M2 and GLM-4.5-Air."""

BYTES = 200 << 20
"""Size of all matrices of a shape together."""


def load(path: Path) -> Any:
    """Another build's library.

    Raises:
        AttributeError: it has no function of a name.
    """
    loaded = ctypes.CDLL(str(path.resolve()))
    for name in (
        "edgemoe_open",
        "edgemoe_bf16",
        "edgemoe_choose_widest",
        "edgemoe_dense_product",
        "edgemoe_dense_heads",
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = SIGNATURES[name]
    loaded.edgemoe_bf16(True)
    loaded.edgemoe_choose_widest()
    return loaded


def products(shape: str) -> tuple[int, Callable[[Any, Any, int], torch.Tensor]]:
    """Bytes of a matrix, or of all heads', and a function of a library, its threads and a number, that multiplies the
    matrix of that number by a row."""
    *heads, rows, cols = (int(each) for each in shape.removesuffix("r").split("x"))
    size = rows * cols * (heads[0] if heads else 1)
    weights = torch.randint(-127, 128, (max(2, BYTES // size), size), dtype=torch.int8)
    by_row = not heads or shape.endswith("r")
    scale = torch.rand((heads[0] if heads else 1) * (rows if by_row else cols)).mul(0.01).bfloat16()
    x, y = (torch.randn((heads[0] if heads else 1) * each).bfloat16() for each in (cols, rows))

    def dense(library: Any, pool: Any, number: int) -> torch.Tensor:
        own = DenseWeight(weights[number % len(weights)].data_ptr(), scale.data_ptr(), rows, cols, 8)
        library.edgemoe_dense_product(pool, ctypes.byref(own), x.data_ptr(), 1, cols, y.data_ptr(), rows)
        return y

    def of_heads(library: Any, pool: Any, number: int) -> torch.Tensor:
        own = DenseHeads(
            weight=weights[number % len(weights)].data_ptr(),
            scale=scale.data_ptr(),
            scale_stride=rows if by_row else cols,
            by_column=not by_row,
            heads=heads[0],
            stride=rows * cols,
            rows=rows,
            cols=cols,
            x_stride=cols,
            y_stride=rows,
            x_cols=heads[0] * cols,
            y_cols=heads[0] * rows,
        )
        library.edgemoe_dense_heads(pool, ctypes.byref(own), x.data_ptr(), 1, y.data_ptr())
        return y

    return size, of_heads if heads else dense


def rates(shape: str, builds: Sequence[tuple[Any, Any]], rounds: int) -> list[float]:
    """Bytes per second of each build, medians.

    Args:
        shape: rows and columns, written as on the command line.
        builds: libraries and their threads.
        rounds: number of turns of each.

    Raises:
        SystemExit: two builds give different bits.
    """
    size, multiply = products(shape)
    times: list[list[float]] = [[] for _ in builds]
    count = max(2, BYTES // size)
    first = multiply(*builds[0], 0).clone()
    for _ in range(rounds):
        for (library, pool), own in zip(builds, times, strict=True):
            start = time.perf_counter()
            for number in range(count):
                multiply(library, pool, number)
            own.append((time.perf_counter() - start) / count)
            if not torch.equal(multiply(library, pool, 0), first):
                raise SystemExit(f"{shape}: expected the same bits of all builds, got others")
    return [size / median(own) for own in times]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser("tools.timing.dense", __doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="SHAPE")
    parser.add_argument(
        "--against", nargs="+", type=Path, default=[], metavar="SO", help="other builds' libraries"
    )
    parser.add_argument("--rounds", type=positive, default=6)
    given = parser.parse_args(argv)
    threads = torch.get_num_threads()
    libraries = [native.library(), *map(load, given.against)]
    builds = [(library, library.edgemoe_open(threads)) for library in libraries]
    print(f"{identity()['cpu']}, {threads} threads, GB/s\n")
    names = "".join(f" {path} |" for path in given.against)
    print(f"| shape | this build |{names}\n|---|---|{'---|' * len(given.against)}", flush=True)
    for shape in given.shapes:
        cells = " | ".join(f"{rate / 1e9:.1f}" for rate in rates(shape, builds, given.rounds))
        print(f"| {shape} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
