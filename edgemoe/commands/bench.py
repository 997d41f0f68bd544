"""`edgemoe bench`: its options and its output. Heavy imports happen inside the functions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from edgemoe.commands import options
from edgemoe.console.output_files import require_folders, require_plot
from storage.errors import UserError

EXAMPLES = (
    "Examples: edgemoe bench --model DIR --vram-limit 3GB --levels 4/2 --retention 0.75 | "
    "edgemoe bench --model DIR --vram-limit 3GB --ablation --runs 3 --plot ablation.png --format json | "
    "edgemoe bench --model DIR --vram-limit 3GB --exact 4 --runs 1 --trace trace.json"
)
"""For app.command(epilog=...)."""

_FORMATS = ("md", "csv", "json", "jsonl")

AblationOption = Annotated[
    bool,
    typer.Option("--ablation", help="Load on demand, cache, prefetch and levels, each added in its row."),
]
PromptFileOption = Annotated[
    Path | None, typer.Option(help="Text to take prompts from. Default: conversations of the demo's tasks.")
]
PromptsOption = Annotated[
    str, typer.Option(help="text, random (tokens; their routing is not a text's), or both as arms.")
]
PromptTokensOption = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
NewTokensOption = Annotated[int, typer.Option(min=2, help="Tokens decoded after it.")]
RunsOption = Annotated[int, typer.Option(min=1, help="Runs of each row, cold and warm, rows in turn.")]
QualityOption = Annotated[
    Path | None, typer.Option(help="Report of `edgemoe eval --json`, merged by the settings' names.")
]
PlotOption = Annotated[Path | None, typer.Option(help="Image file to draw the rows into.")]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        help="JSON file for a timeline of one more run of each row, for chrome://tracing or Perfetto: "
        "computing, waiting, copies, and reads by each reader, a lane each."
    ),
]
FormatOption = Annotated[str | None, typer.Option("--format", help="md, csv, json or jsonl. Default: md.")]
AsJsonOption = Annotated[bool, typer.Option("--json", help="The same as --format json.")]


def bench_command(
    model: options.ModelOption = options.DEMO,
    vram_limit: options.VramOption = None,
    dram_limit: options.DramOption = None,
    device: options.DeviceOption = "auto",
    exact: options.ExactOption = None,
    levels: options.LevelsOption = None,
    retention: options.RetentionOption = None,
    importance: options.ImportanceOption = None,
    heavy_hitters: options.HeavyHittersOption = None,
    eviction: options.EvictionOption = None,
    speculate: options.SpeculateOption = None,
    cpu_experts: options.CpuExpertsOption = None,
    context: options.ContextOption = None,
    ablation: AblationOption = False,
    prompt_file: PromptFileOption = None,
    prompts: PromptsOption = "text",
    prompt_tokens: PromptTokensOption = 64,
    new_tokens: NewTokensOption = 64,
    runs: RunsOption = 3,
    quality: QualityOption = None,
    plot: PlotOption = None,
    trace: TraceOption = None,
    seed: options.SeedOption = 0,
    output: FormatOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Measure TTFT and TPOT with an empty and a warm expert cache, beside the bound by bytes moved."""
    form = _format(output, as_json)
    chosen: dict[str, Any] = {
        "exact": exact,
        "levels": levels,
        "retention": retention,
        "importance": importance,
        "heavy_hitters": heavy_hitters,
        "eviction": eviction,
        "speculate": speculate,
        "cpu_experts": cpu_experts,
    }
    if ablation:
        _require_defaults(chosen)
    require_folders(trace)
    require_plot(plot)
    from edgemoe.models.open import open_model, parse_limits

    limits = parse_limits(vram_limit, dram_limit)
    options.run_settings(8, **chosen)  # raises for settings that exclude each other before a long conversion
    from edgemoe.bench.plot import plot_report
    from edgemoe.bench.quality import load_quality
    from edgemoe.bench.rows import ablation_rows, single_row
    from edgemoe.bench.run import BenchRequest, run_bench
    from edgemoe.bench.tables import FORMATS
    from edgemoe.bench.traced import trace_rows

    evaluated = load_quality(quality) if quality else ()
    store = open_model(model, device)
    top = store.manifest.max_level
    rows, notes = ablation_rows(top) if ablation else (single_row(options.run_settings(top, **chosen)), ())
    request = BenchRequest(
        rows, *limits, prompts, prompt_file, prompt_tokens, new_tokens, runs, seed, context, notes
    )
    report = run_bench(store, request, evaluated, _notify)
    print(FORMATS[form](report), flush=True)
    if plot:
        plot_report(report, plot)
    if trace:
        trace_rows(store, request, _notify).write(trace)


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


def _require_defaults(chosen: dict[str, Any]) -> None:
    """Refuses settings beside an ablation, whose rows have their own."""
    given = [f"--{name.replace('_', '-')}" for name, value in chosen.items() if value not in (None, False)]
    if given:
        raise UserError(
            "--ablation without settings: its rows have their own",
            ", ".join(given),
            "leave that out, or measure one setting without --ablation",
        )
