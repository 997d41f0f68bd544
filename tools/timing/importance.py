"""Times a prefill with heavy-hitter scores (DyMoE eq. 1-2) and one that ranks experts by their load.

    python -m tools.timing.importance CHECKPOINT_OR_STORE [--tokens 512] [--runs 3] [--vram-limit all|SIZE] [--json]

One prompt is prefilled at levels 4/2 with each --importance in turn; the first round is not measured. By default all
experts are resident, so that no read takes part; under a SIZE both times include reads. Prints every time, both
medians, and their quotient less 1: the fraction that the scores add.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from edgemoe.bench.prompts import make_prompts
from edgemoe.console.sizes import format_size
from edgemoe.engine.engine import Engine, StoreModel
from edgemoe.errors import DoesNotFit, EdgemoeError
from edgemoe.memory.plan import MemoryPlan
from edgemoe.models.open import open_store
from edgemoe.models.options.groups import Opening
from edgemoe.models.plans.division import within_memory
from edgemoe.policy.settings import RunSettings
from tools.command_line import failed, make_parser, positive

LOAD, SCORED = "load", "heavy-hitters"

SETTINGS = RunSettings(levels=(4, 2), importance=LOAD)


def time_signals(engine: Engine, prompt: Sequence[int], runs: int) -> dict[str, list[float]]:
    """Times prefills of a prompt with each signal in turn, each in its own sequence.

    Args:
        engine: open for SETTINGS and a context of the prompt's length.
        prompt: token ids.
        runs: prefills of each signal, after one that is not counted.

    Returns:
        signal -> seconds of each run.
    """
    found: dict[str, list[float]] = {LOAD: [], SCORED: []}
    for _ in range(runs + 1):
        for signal, seconds in found.items():
            engine.configure(SETTINGS.with_(importance=signal))
            sequence = engine.sequences.new()
            start = perf_counter()
            engine.prefill(sequence, prompt)
            seconds.append(perf_counter() - start)
            engine.sequences.end(sequence)
    return {signal: seconds[1:] for signal, seconds in found.items()}


def require_resident(store: StoreModel, plan: MemoryPlan) -> None:
    """Raises DoesNotFit unless every expert has a block of every kind."""
    blocks = min(plan.vram_blocks.values())
    if blocks < store.shape.experts:
        level = SETTINGS.levels[0]
        more = (store.shape.experts - blocks) * store.form.bytes_at(level)
        raise DoesNotFit(
            f"memory for all {store.shape.experts} experts of {store.directory} at level {level}",
            f"blocks for {blocks}",
            "give --vram-limit SIZE to time prefills that read",
            minimum=plan.vram_limit_bytes + more,
        )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Times the prefills; returns the report by the names that --json prints, in seconds, bytes and tokens.

    Raises:
        UserError: there is no such model.
        DoesNotFit: the model does not run in the limit, or is not fully resident under the limit "all".
        DamagedData: the store is damaged.
    """
    resident = options.vram_limit == "all"
    limit = None if resident else options.vram_limit
    opening = Opening(options.model, vram_limit=limit, context=options.tokens)
    store, plan, settings = open_store(opening, lambda max_level, *, fits, hot=False: SETTINGS)
    plan = within_memory(store, plan, settings)
    if resident:
        require_resident(store, plan)
    (prompts,) = make_prompts(store, "text", None, options.tokens, 1, options.seed)
    with Engine(store, plan, settings) as engine:
        found = time_signals(engine, prompts.prompts[0](), options.runs)
    medians = {signal: median(seconds) for signal, seconds in found.items()}
    return {
        "prompt_tokens": options.tokens,
        "prompts": prompts.source,
        "seed": options.seed,
        "threads": torch.get_num_threads(),
        "vram_limit_bytes": plan.vram_limit_bytes,
        "experts_resident": min(plan.vram_blocks.values()),
        "samples_s": found,
        "median_s": medians,
        "added_share": medians[SCORED] / medians[LOAD] - 1,
    }


def as_table(report: dict[str, Any]) -> str:
    """A Markdown table with a row for each signal, and the difference of their medians in percent."""
    lines = [
        f"{report['prompt_tokens']} tokens of {report['prompts']}, {report['threads']} threads, --vram-limit "
        f"{format_size(report['vram_limit_bytes'])}: {report['experts_resident']} experts resident\n",
        "| importance | median s | samples s |",
        "|---|---|---|",
    ]
    for signal, seconds in report["samples_s"].items():
        samples = ", ".join(f"{each:.3f}" for each in seconds)
        lines.append(f"| {signal} | {report['median_s'][signal]:.3f} | {samples} |")
    return "\n".join([*lines, f"\n{SCORED} over {LOAD}: {100 * report['added_share']:+.1f} %"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = make_parser("tools.timing.importance", __doc__)
    parser.add_argument("model", type=Path, metavar="CHECKPOINT_OR_STORE")
    parser.add_argument("--tokens", type=positive, default=512, help="of the prompt; default: 512")
    parser.add_argument("--runs", type=positive, default=3, help="of each importance; default: 3")
    parser.add_argument(
        "--vram-limit",
        default="all",
        metavar="all|SIZE",
        help="default: all, which keeps every expert resident",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompt")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(argv)
    try:
        report = measure(options)
    except EdgemoeError as error:
        return failed("tools.timing.importance", error)
    print(json.dumps(report) if options.json else as_table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
