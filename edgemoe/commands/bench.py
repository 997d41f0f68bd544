"""`edgemoe bench`: its options, and where its results go. Heavy imports happen inside."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgemoe.commands.options import (
    DEMO,
    ContextOption,
    CpuExpertsOption,
    DeviceOption,
    DramOption,
    EvictionOption,
    ExactOption,
    GraphsOption,
    HeavyHittersOption,
    ImportanceOption,
    LevelsOption,
    ModelOption,
    RetentionOption,
    SeedOption,
    SpeculateOption,
    VramOption,
    run_settings,
)
from edgemoe.console.output_files import require_folders, require_plot
from storage.errors import UserError

if TYPE_CHECKING:
    from edgemoe.bench.run import BenchRequest
    from edgemoe.engine.engine import StoreModel

EXAMPLES = (
    "Examples: edgemoe bench --model DIR --vram-limit 3GB --levels 4/2 --retention 0.75 | "
    "edgemoe bench --model DIR --vram-limit 3GB --ablation --runs 3 --plot ablation.png --format json | "
    "edgemoe bench --model DIR --vram-limit 3GB --exact 4 --runs 1 --trace trace.json"
)
"""For app.command(epilog=...)."""


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
    model: ModelOption = DEMO,
    vram_limit: VramOption = None,
    dram_limit: DramOption = None,
    device: DeviceOption = "auto",
    exact: ExactOption = None,
    levels: LevelsOption = None,
    retention: RetentionOption = None,
    importance: ImportanceOption = None,
    heavy_hitters: HeavyHittersOption = None,
    eviction: EvictionOption = None,
    speculate: SpeculateOption = None,
    cpu_experts: CpuExpertsOption = None,
    graphs: GraphsOption = False,
    context: ContextOption = None,
    ablation: AblationOption = False,
    prompt_file: PromptFileOption = None,
    prompts: PromptsOption = "text",
    prompt_tokens: PromptTokensOption = 64,
    new_tokens: NewTokensOption = 64,
    runs: RunsOption = 3,
    quality: QualityOption = None,
    plot: PlotOption = None,
    trace: TraceOption = None,
    seed: SeedOption = 0,
    output: FormatOption = None,
    as_json: AsJsonOption = False,
) -> None:
    """Measure TTFT and TPOT with an empty and a warm expert cache, beside the bound by bytes moved."""
    wanted = _format(output, as_json)
    chosen: dict[str, Any] = {
        "exact": exact,
        "levels": levels,
        "retention": retention,
        "importance": importance,
        "heavy_hitters": heavy_hitters,
        "eviction": eviction,
        "speculate": speculate,
        "cpu_experts": cpu_experts,
        "graphs": graphs,
    }
    _refuse_with_ablation(ablation, chosen)
    require_folders(trace)
    require_plot(plot)
    from edgemoe.models.open import open_model, parse_limits

    vram, dram = parse_limits(vram_limit, dram_limit)
    run_settings(8, **chosen)  # before a conversion that may take an hour
    from edgemoe.bench.quality import load_quality
    from edgemoe.bench.rows import ablation_rows, single_row
    from edgemoe.bench.run import BenchRequest

    measured = load_quality(quality) if quality else ()
    store = open_model(model, device)
    top = store.manifest.max_level
    rows, notes = ablation_rows(top) if ablation else (single_row(run_settings(top, **chosen)), ())
    request = BenchRequest(
        rows, vram, dram, prompts, prompt_file, prompt_tokens, new_tokens, runs, seed, context, notes
    )
    _run(store, request, measured, wanted, plot, trace)


def _run(
    store: StoreModel,
    request: BenchRequest,
    quality: Sequence[dict[str, Any]],
    wanted: str,
    plot: Path | None,
    trace: Path | None,
) -> None:
    from edgemoe.bench.plot import plot_report
    from edgemoe.bench.run import run_bench
    from edgemoe.bench.tables import FORMATS
    from edgemoe.bench.traced import trace_rows

    def notify(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    report = run_bench(store, request, quality, notify)
    print(FORMATS[wanted](report), flush=True)
    if plot:
        plot_report(report, plot)
    if trace:
        trace_rows(store, request, notify).write(trace)


def _format(output: str | None, as_json: bool) -> str:
    if as_json and output not in (None, "json"):
        raise UserError("one format was wanted", f"got --json and --format {output}", "Leave one out")
    chosen = "json" if as_json else output or "md"
    known = ("md", "csv", "json", "jsonl")
    if chosen not in known:
        raise UserError(f"--format {' or '.join(known)} was wanted", f"got {chosen!r}", "Choose one")
    return chosen


def _refuse_with_ablation(ablation: bool, chosen: dict[str, Any]) -> None:
    given = [f"--{name.replace('_', '-')}" for name, value in chosen.items() if value not in (None, False)]
    if ablation and given:
        raise UserError(
            "the rows of an ablation were wanted, whose settings are fixed",
            f"got {', '.join(given)} too",
            "Leave that out, or measure one setting without --ablation",
        )
