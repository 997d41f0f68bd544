"""Fits lines to edgemoe's times over the number of layers, at a fixed ratio of limit to model.

    python -m tools.synthetic.store --like qwen3-30b-a3b --layers 16 --vocab 32000 --max-level 4 --dense-bits 8 w16
    python -m tools.peers.scaling w16 w32 w48 --ratio 0.5 --rounds 3 --json scaling.json --plot scaling.png

w32 and w48 are made as w16 is. Every answer runs in its own process and memory cgroup, as in tools.peers.compare: exact
level 4, cold and filled, the same prompt for every store in a round, another store first each round. --vram-limit is
--ratio of the bytes of the fully resident model; the cgroup's limit adds --beside, which is the same for every store.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgemoe.bench.environment import environment
from edgemoe.bench.prompts import text_prompts
from edgemoe.console.output_files import require_folders, require_plot
from edgemoe.console.sizes import format_size, parse_size
from edgemoe.engine.engine import StoreModel
from edgemoe.errors import EdgemoeError, UserError
from edgemoe.models.demo import DEMO
from edgemoe.models.tokenizer import load_tokenizer
from edgemoe.policy.settings import RunSettings
from tools.command_line import failed, make_parser, positive, two_or_more
from tools.peers.limited import Controller, LimitError, find_controller
from tools.peers.options import BESIDE_BYTES, BESIDE_HELP
from tools.peers.programs import edgemoe_program
from tools.peers.report import Case, Json, run_of
from tools.peers.run import interrupt_on_signals, prove_enforced, run_child

LEVEL = 4


@dataclass(frozen=True)
class Line:
    """A line fitted by least squares.

    Args:
        slope: y for each x.
        intercept: y at x = 0.
        r_squared: fraction of the variance that the line explains; 1 where y does not vary.
        off: largest distance of a point from the line, relative to the line's value at that point.
    """

    slope: float
    intercept: float
    r_squared: float
    off: float


def fit(x: Sequence[float], y: Sequence[float]) -> Line:
    """Fits a line to two or more points of different x."""
    slope, intercept = (float(part) for part in np.polyfit(x, y, 1))
    on_line, values = slope * np.array(x) + intercept, np.array(y)
    spread = float(((values - values.mean()) ** 2).sum())
    left = float(((values - on_line) ** 2).sum())
    off = float(np.abs(values / on_line - 1).max())
    return Line(slope, intercept, 1 - left / spread if spread else 1.0, off)


def vram_limit(store: StoreModel, ratio: float, context: int) -> int:
    """`ratio` of the bytes of the fully resident model at LEVEL: experts, dense weights, KV and workspace.

    Raises:
        DoesNotFit: the store does not run in the result.
    """
    settings = RunSettings.uniform(LEVEL)
    plan = store.plan(vram_limit=None, settings=settings, context=context)
    limit = int(ratio * (plan.fixed_bytes + store.shape.experts * store.form.bytes_at(LEVEL)))
    return store.plan(vram_limit=limit, settings=settings, context=context).vram_limit_bytes


def measure(controller: Controller, stores: Sequence[StoreModel], options: argparse.Namespace) -> list[Json]:
    """Runs every store in every round; each run has the `layers` of its store.

    Raises:
        DoesNotFit: a store does not run in its limit.
        UserError: a run fails; the line needs every run.
    """
    context = options.prompt_tokens + options.new_tokens
    limits = {store.shape.layers: vram_limit(store, options.ratio, context) for store in stores}
    tokenizer = load_tokenizer(DEMO)
    prompts = text_prompts(tokenizer, None, options.prompt_tokens, options.rounds, options.seed).prompts
    runs = []
    for number, encode in enumerate(prompts):
        first = number % len(stores)
        for store in [*stores[first:], *stores[:first]]:
            own = limits[store.shape.layers]
            limit, program = own + options.beside, edgemoe_program(str(LEVEL), store.directory)
            request: dict[str, Any] = {
                "model": str(store.directory),
                "prompts": [encode()],
                "new_tokens": options.new_tokens,
                "warm_up": [],
                "threads": options.threads,
                "popularity": False,
                "settings": program.settings,
                "fill": program.fill,
                "vram_limit": own,
            }
            outcome = run_child(controller, limit, program.command, request, keep_cache=options.keep_cache)
            run = run_of(store.directory.name, Case(limit, options.prompt_tokens), number, outcome)
            if outcome.failure:
                raise UserError(
                    f"{store.directory} to run inside {format_size(limit)}",
                    outcome.failure,
                    "raise --ratio or --beside",
                )
            times = f"TTFT {run['ttft_s']:.2f} s, TPOT {1000 * run['tpot_s']:.1f} ms"
            print(f"round {number + 1}, {store.shape.layers} layers: {times}", file=sys.stderr, flush=True)
            runs.append(run | {"layers": store.shape.layers, "vram_limit_bytes": own})
    return runs


def summarize(runs: Sequence[Json]) -> Json:
    """The means of each number of layers, and the lines fitted to them; seconds."""
    layers = sorted({run["layers"] for run in runs})
    rows = [
        {
            "layers": number,
            "limit_bytes": group[0]["limit_bytes"],
            "vram_limit_bytes": group[0]["vram_limit_bytes"],
            **{time: float(np.mean([run[time] for run in group])) for time in ("ttft_s", "tpot_s")},
            "hit_rate": float(np.mean([run["row"]["hit_rate"]["vram"] or 0 for run in group])),
            "runs": len(group),
        }
        for number in layers
        for group in [[run for run in runs if run["layers"] == number]]
    ]
    lines = {time: asdict(fit(layers, [row[time] for row in rows])) for time in ("ttft_s", "tpot_s")}
    return {"rows": rows, "lines": lines}


def as_table(summary: Json) -> str:
    """A Markdown table with a row for each number of layers, and the equations of the lines."""
    lines = [
        "| layers | limit | --vram-limit | TTFT s | TPOT ms | TPOT ms a layer | hits % | runs |",
        "|---" * 8 + "|",
    ]
    for row in summary["rows"]:
        lines.append(
            f"| {row['layers']} | {format_size(row['limit_bytes'])} | {format_size(row['vram_limit_bytes'])} "
            f"| {row['ttft_s']:.2f} | {1000 * row['tpot_s']:.1f} | {1000 * row['tpot_s'] / row['layers']:.2f} "
            f"| {100 * row['hit_rate']:.0f} | {row['runs']} |"
        )
    for time, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        line = summary["lines"][time]
        lines.append(
            f"\n{name} = {1000 * line['intercept']:.1f} ms + {1000 * line['slope']:.2f} ms a layer, "
            f"R² {line['r_squared']:.4f}, no point off by more than {100 * line['off']:.1f} %"
        )
    return "\n".join(lines)


def plot(summary: Json, path: Path) -> None:
    """Draws the times over layers and the lines into an image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    layers = [row["layers"] for row in summary["rows"]]
    left, right = figure.subplots(1, 2)
    for axes, time, name in ((left, "ttft_s", "TTFT, s"), (right, "tpot_s", "TPOT, s")):
        line = summary["lines"][time]
        axes.plot(layers, [row[time] for row in summary["rows"]], "o")
        axes.plot(layers, [line["intercept"] + line["slope"] * x for x in layers], "-")
        axes.set(title=name, xlabel="layers", ylim=(0, None))
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = make_parser("tools.peers.scaling", __doc__)
    add = parser.add_argument
    add("stores", nargs="+", type=Path, metavar="STORE", help="two or more, alike but for their layers")
    add("--ratio", type=float, default=0.5, help="of --vram-limit to model; default: 0.5")
    add("--beside", type=parse_size, default=BESIDE_BYTES, help=BESIDE_HELP)
    add("--prompt-tokens", type=positive, default=64, help="default: 64")
    add("--new-tokens", type=two_or_more, default=64, help="default: 64")
    add("--rounds", type=positive, default=3, help="runs of every store; default: 3")
    add("--threads", type=positive, default=2, help="default: 2")
    add("--keep-cache", action="store_true", help="do not drop the page cache before a run")
    add("--seed", type=int, default=0, help="of prompts")
    add("--json", type=Path, help="file for raw samples")
    add("--plot", type=Path, help="image file to draw into")
    options = parser.parse_args(argv)
    if not 0 < options.ratio <= 1:
        parser.error(f"expected a --ratio above 0 and at most 1, got {options.ratio:g}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    try:
        options = parse(argv)
        interrupt_on_signals()
        require_folders(options.json)
        require_plot(options.plot)
        stores = [StoreModel.open(path) for path in options.stores]
        if len({store.shape.layers for store in stores}) < max(len(stores), 2):
            found = ", ".join(str(store.shape.layers) for store in stores)
            raise UserError(
                "two or more stores of different depth", f"stores of {found} layers", "name others"
            )
        controller = find_controller(Path("/proc/mounts").read_text())
        prove_enforced(controller)
        runs = measure(controller, stores, options)
        summary = summarize(runs)
        print(as_table(summary))
        if options.json:
            options.json.write_text(
                json.dumps({"environment": environment(stores[0]), **summary, "runs": runs})
            )
        if options.plot:
            plot(summary, options.plot)
    except (EdgemoeError, LimitError) as error:
        return failed("tools.peers.scaling", error)
    except KeyboardInterrupt:
        print("tools.peers.scaling: interrupted; no process of it still runs", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
