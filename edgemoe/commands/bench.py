"""`edgemoe bench`: its options and its output. Heavy imports happen inside the functions."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgemoe.commands import options
from edgemoe.commands.option_groups import grouped, one_of, option
from edgemoe.console.output_files import require_folders, require_plot
from storage.errors import UserError

EXAMPLES = (
    "Examples: edgemoe bench --model DIR --vram-limit 3GB --levels 4/2 --retention 0.75 | "
    "edgemoe bench --model DIR --vram-limit 3GB --ablation --runs 3 --plot ablation.png --format json | "
    "edgemoe bench --model DIR --vram-limit 3GB --exact 4 --runs 1 --trace trace.json"
)
"""For app.command(epilog=...)."""

_FORMATS = ("md", "csv", "json", "jsonl")


@dataclass(frozen=True)
class PromptOptions:
    """Options that are fields of a BenchRequest."""

    prompt_file: Path | None = option(
        "Text to take prompts from. Default: conversations of the demo's tasks."
    )
    prompts: str = option(
        "text, random (tokens; their routing is not a text's), or both as arms.",
        "text",
        autocompletion=one_of("text", "random", "both"),
    )
    prompt_tokens: int = option("Tokens of each prompt.", 64, min=1)
    new_tokens: int = option("Tokens decoded after it.", 64, min=2)
    runs: int = option("Runs of each row, cold and warm, rows in turn.", 3, min=1)


@dataclass(frozen=True)
class ReportOptions:
    """Options of the rows, of the report and of what is measured beside it."""

    ablation: bool = option("Load on demand, cache, prefetch and levels, each added in its row.", False)
    quality: Path | None = option("Report of `edgemoe eval --json` on the same store, merged by settings.")
    plot: Path | None = option("Image file to draw the rows into.")
    trace: Path | None = option(
        "JSON file for a timeline of one more run of each row, for chrome://tracing or Perfetto: "
        "computing, waiting, copies, and reads by each reader, a lane each."
    )
    seed: int = option("Seed of everything random.", 0)
    output: str | None = option(
        "md, csv, json or jsonl. Default: md.", name="--format", autocompletion=one_of(*_FORMATS)
    )
    as_json: bool = option("The same as --format json.", False, name="--json")


@grouped
def bench_command(
    *,
    model: options.ModelOption = options.DEMO,
    limits: options.LimitOptions,
    chosen: options.SettingOptions,
    context: options.ContextOption = None,
    threads: options.ThreadsOption = None,
    prompts: PromptOptions,
    wanted: ReportOptions,
) -> None:
    """Measure TTFT and TPOT with an empty and a warm expert cache, beside the bound by bytes moved.

    A row whose peak exceeds its limits is marked as invalid, and the command exits 3.
    """
    form = _format(wanted.output, wanted.as_json)
    if wanted.ablation:
        _require_defaults(chosen)
    require_folders(wanted.trace)
    require_plot(wanted.plot)
    from edgemoe.models.open import open_model, parse_limits, plan_levels

    sizes = parse_limits(limits.vram_limit, limits.dram_limit)
    # Settings that exclude each other are refused before a long conversion.
    options.run_settings(8, **vars(chosen))
    choose = partial(options.run_settings, **vars(chosen))
    from edgemoe.bench.plot import plot_report
    from edgemoe.bench.quality import load_quality
    from edgemoe.bench.rows import ablation_rows, single_row
    from edgemoe.bench.run import BenchRequest, require_valid, run_bench
    from edgemoe.bench.tables import FORMATS
    from edgemoe.bench.traced import trace_rows

    evaluated = load_quality(wanted.quality) if wanted.quality else None
    store = open_model(model, limits.device, threads=threads)
    tokens = context or prompts.prompt_tokens + prompts.new_tokens
    rows, notes = (
        ablation_rows(store.manifest.max_level)
        if wanted.ablation
        else (single_row(plan_levels(store, choose, *sizes, tokens)[1]), ())
    )
    quality, left_out = evaluated.of(store.manifest) if evaluated else ([], ())
    notes += left_out
    request = BenchRequest(rows, *sizes, seed=wanted.seed, context=context, notes=notes, **vars(prompts))
    report = run_bench(store, request, quality, _notify)
    print(FORMATS[form](report), flush=True)
    if wanted.plot:
        plot_report(report, wanted.plot)
    if wanted.trace:
        trace_rows(store, request, _notify).write(wanted.trace)
    require_valid(report)


def _notify(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _format(output: str | None, as_json: bool) -> str:
    """Returns the format of --format or --json."""
    if as_json and output not in (None, "json"):
        raise UserError("one output format", f"--json and --format {output}", "leave one of them out")
    chosen = "json" if as_json else output or "md"
    if chosen not in _FORMATS:
        raise UserError(f"one of {', '.join(_FORMATS)} for --format", repr(chosen), "choose one of them")
    return chosen


def _require_defaults(chosen: options.SettingOptions) -> None:
    """Refuses settings beside an ablation, whose rows have their own."""
    given = [
        f"--{name.replace('_', '-')}" for name, value in vars(chosen).items() if value not in (None, False)
    ]
    if given:
        raise UserError(
            "--ablation without settings: its rows have their own",
            ", ".join(given),
            "leave that out, or measure one setting without --ablation",
        )
