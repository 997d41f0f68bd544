"""Times products of an expert's rows by edgemoe's kernel and by the plainest loops of plain/grouped.c, in one run.

    python -m tools.timing.products [--rows 1 16 64 256] [--levels 2 4 8] [--cores 1 2] [--rounds 5]

Prints TMAC/s per core, the best of some rounds, of one matrix [1536, 2048] in groups of 64 columns, whose bytes stay in
a cache. edgemoe's time includes the quantization of rows and the rounding of results to bf16, the plain loops' neither.
These know no planes and no few rows, so they take 4-bit codes and multiples of 16 rows; gcc compiles them here. All
kernels take turns in each round, so that a slow moment of the machine meets all of them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import torch

from edgemoe.kernels.native import library as native
from edgemoe.kernels.native import paths
from edgemoe.kernels.native.experts import NativeExpertKernel
from edgemoe.kernels.native.structures import Expert
from edgemoe.kernels.samples import random_experts
from edgemoe.machine.cpu import identity
from edgemoe.storage.record.forms import PlaneForm
from edgemoe.storage.record.offsets import MatrixSpec, RecordGeometry
from tools.command_line import make_parser, positive
from tools.timing.plain_loops import COLS, REPEATS, ROWS, PlainLoops

GEOMETRY = RecordGeometry((MatrixSpec.of("gate_up", 1536, 2048, 64), MatrixSpec.of("down", 2048, 768, 64)), 8)


class OwnProducts:
    """edgemoe_expert_product of one expert for each core, on a pool of so many threads."""

    def __init__(self, cores: int) -> None:
        self._cores, self._pool = cores, native.library().edgemoe_open(cores)
        form = PlaneForm(GEOMETRY, native.LAYOUT, native.LAYOUT)
        self._experts = random_experts(form, GEOMETRY, cores)
        self._kernel = NativeExpertKernel(GEOMETRY, native.LAYOUT)

    def call(self, path: str, level: int, tokens: int) -> Callable[[], None]:
        """A call of REPEATS products on each core by a path."""
        up = self._kernel.matrices()[0]
        count, rows = self._cores * REPEATS, self._cores * REPEATS * tokens
        experts = (Expert * count)()
        for i in range(count):
            one = self._kernel.prepared(self._experts[i % self._cores], level, tokens)
            one.x = one.y = i * tokens
            experts[i] = one
        x, y = torch.randn(rows, COLS).bfloat16(), torch.empty(rows, ROWS, dtype=torch.bfloat16)
        choice = paths.forced(path)

        def run() -> None:
            paths.choose(choice)
            result = native.library().edgemoe_expert_product(
                *(self._pool, up, 0, experts, count),
                *(x.data_ptr(), rows, COLS, None, None, y.data_ptr(), rows, ROWS),
            )
            assert result == 0, result

        return run

    def close(self) -> None:
        """Ends the threads."""
        native.library().edgemoe_close(self._pool)


def rates(calls: dict[str, Callable[[], None]], products: int, rounds: int) -> dict[str, float]:
    """The best rate of each call in TMAC/s, the calls taking turns."""
    best = dict.fromkeys(calls, 0.0)
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:  # the first warms up
                best[name] = max(best[name], products / (time.perf_counter() - start) / 1e12)
    return best


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = make_parser("tools.timing.products", __doc__)
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 16, 64, 256], help="of an expert")
    parser.add_argument("--levels", type=int, nargs="+", choices=(8, 4, 2), default=[2, 4, 8])
    parser.add_argument("--cores", type=positive, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=positive, default=5)
    given = parser.parse_args(argv)
    print(f"{identity()['cpu']}\n| cores | rows | level | kernel | TMAC/s per core |\n|---|---|---|---|---|")
    before = paths.choice()
    with tempfile.TemporaryDirectory() as directory:
        plain = PlainLoops(Path(directory))
        for cores in given.cores:
            own = OwnProducts(cores)
            for tokens, level in product(given.rows, given.levels):
                here = paths.candidates("experts", paths.ROWS[-1])
                calls = {f"edgemoe, {path}": own.call(path, level, tokens) for path in here}
                if level == 4 and tokens % 16 == 0:
                    calls |= {f"plain loop, {name}": plain.call(name, tokens, cores) for name in plain.names}
                found = rates(calls, REPEATS * tokens * ROWS * COLS, given.rounds)
                for name, rate in found.items():
                    print(f"| {cores} | {tokens} | {level} | {name} | {rate:.4f} |", flush=True)
            own.close()
    paths.choose(before)


if __name__ == "__main__":
    main()
