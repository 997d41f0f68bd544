"""Times the kernels of a new token's products on a GPU: experts from planes, and dense layers of one row.

    mkdir before && git archive COMMIT edgemoe/kernels/triton | tar -x -C before
    python -m tools.gpu.kernels --before before --json kernels.json

It needs no store. Experts are random, at published models' sizes, in the GPU's memory and in pinned memory, and rotate
over more bytes than a cache holds. A row is the time of one token in one layer: both products of its experts, or a
dense layer, launched by a CUDA graph. --before names a folder with older kernels, which are timed first. `difference`
compares the results of experts with the first row of the same level. Several processes compile all kernels first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edgemoe.kernels.triton import dense
from edgemoe.kernels.triton.experts import VECTOR
from edgemoe.kernels.triton.products import Tile
from tools.command_line import make_parser
from tools.gpu.kernel_data import DENSE, LEVELS, MODELS, Experts, dense_layer
from tools.gpu.kernel_launches import launch_dense, launch_experts

TILES = (
    VECTOR,
    *(Tile(rows=8, side=side, warps=warps) for side, warps in ((32, 8), (8, 2), (32, 4), (4, 1))),
)
BEFORE = Tile(rows=16, side=4, warps=2)
"""The tile of the kernel before docs/decisions/0067."""

SETS, PINNED_SETS = 8, 4
"""Tokens with different experts, in the GPU's memory and in pinned memory."""

PROCESSES = 14
"""Processes that compile."""

DENSE_TILES = ((dense.ROWS, dense.COLS), (4, 1024), (1, 2048), (2, 2048), (4, 512))
DENSE_BYTES = 200 << 20
"""Bytes of weights to rotate over."""

Row = dict[str, Any]
Launch = Callable[[], None]


def microseconds(launches: list[Launch]) -> float:
    """Time of one of the launches, replayed by a CUDA graph; the fastest of five replays."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(6):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(launches))
    return float(min(times[1:]))


def plans(before: str | None) -> Iterator[tuple[str, Tile, str | None]]:
    """(model, tile, folder of the older kernel) to time; other tiles for the first model alone."""
    for at, model in enumerate(MODELS):
        if before:
            yield model, BEFORE, before
        for tile in TILES if at == 0 else TILES[:1]:
            yield model, tile, None


def compile_one(plan: tuple[str, Tile, str | None]) -> None:
    """Compiles the kernels of a plan into Triton's cache: items of level 0 compute nothing."""
    model, tile, before = plan
    experts = Experts(MODELS[model], 1, pinned=False)
    launch_experts(experts, experts.items(0)[0], tile, before)


def compile_dense(plan: tuple[str, int, int, int, str | None]) -> None:
    """Compiles the kernel of one dense layer."""
    name, bits, rows, columns, before = plan
    launch_dense(*dense_layer(name, bits, 1), (rows, columns), before)


def time_experts(before: str | None) -> Iterator[Row]:
    """The rows of experts."""
    for model, sizes in MODELS.items():
        for pinned in (False, True):
            experts = Experts(sizes, PINNED_SETS if pinned else SETS, pinned=pinned)
            for level in LEVELS:
                tables, reference = experts.items(level), None
                for name, tile, folder in plans(before):
                    if name != model:
                        continue
                    taken = microseconds([partial(launch_experts, experts, t, tile, folder) for t in tables])
                    out = experts.out.float()
                    reference = out if reference is None else reference
                    row: Row = {"what": model, "memory": "pinned" if pinned else "gpu", "level": level}
                    row["kernel"] = (
                        "before" if folder else f"rows {tile.rows} side {tile.side} warps {tile.warps}"
                    )
                    row |= {"us": round(taken, 2), "gb_s": round(experts.token_bytes(level) / taken / 1e3, 1)}
                    yield row | {"difference": float((out - reference).norm() / reference.norm())}


def dense_plans(before: str | None) -> Iterator[tuple[str, int, int, int, str | None]]:
    """(layer, bits, rows and columns of a program, folder of the older kernel) to time."""
    for name in DENSE:
        for bits in (16, 8):
            if before:
                yield name, bits, 2, 1024, before
            for rows, columns in DENSE_TILES:
                yield name, bits, rows, columns, None


def time_dense(before: str | None) -> Iterator[Row]:
    """The rows of dense layers, in bf16 and in 8 bits."""
    made: dict[tuple[str, int], Any] = {}
    for name, bits, rows, columns, folder in dense_plans(before):
        sizes, cols = DENSE[name]
        size = sum(sizes) * cols * bits // 8
        if (name, bits) not in made:
            made = {(name, bits): dense_layer(name, bits, DENSE_BYTES // size + 1)}
        copies, x, out = made[name, bits]
        tile = rows, columns
        taken = microseconds([partial(launch_dense, [each], x, out, tile, folder) for each in copies])
        kernel = "before" if folder else f"rows {rows} columns {columns}"
        row = {"what": name, "memory": "gpu", "level": bits, "kernel": kernel}
        yield row | {"us": round(taken, 2), "gb_s": round(size / taken / 1e3, 1)}


def main() -> int:
    """Prints a row as each is timed, and writes all of them."""
    parser = make_parser("tools.gpu.kernels", __doc__)
    parser.add_argument("--before", metavar="DIR", help="folder with the older edgemoe/kernels/triton")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    options: argparse.Namespace = parser.parse_args()
    if not torch.cuda.is_available():
        print("tools.gpu.kernels needs a GPU", file=sys.stderr)
        return 2
    start, rows = time.perf_counter(), []
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        waiting = pool.map_async(compile_one, list(plans(options.before)), chunksize=1)
        pool.map(compile_dense, [each for each in dense_plans(options.before) if each[0] != "o"], chunksize=1)
        waiting.get()
    print(f"compiled in {time.perf_counter() - start:.1f} s on {torch.cuda.get_device_name()}")
    for rows_of in (time_experts, time_dense):
        for row in rows_of(options.before):
            rows.append(row)
            print(
                f"{time.perf_counter() - start:5.1f} s  "
                + "  ".join(f"{each:>10}" for each in map(str, row.values()))
            )
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
