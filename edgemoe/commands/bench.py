"""`edgemoe bench`: its options and its output. Heavy imports happen inside the functions."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.commands.options.groups import grouped
from edgemoe.console.output_files import require_folders, require_plot
from edgemoe.errors import UserError
from edgemoe.models.options import effects
from edgemoe.models.options.declared import flag, one_of, option
from edgemoe.models.options.groups import (
    ComputeOptions,
    KVOptions,
    LimitOptions,
    ModelOptions,
    Opening,
    SizeOptions,
)
from edgemoe.models.options.papers import take_remapping
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.options.settings import POLICIES, HotnessOptions, SettingOptions

if TYPE_CHECKING:
    from edgemoe.bench.batch import BatchRequest
    from edgemoe.bench.rows import BenchRow
    from edgemoe.bench.run import BenchRequest
    from edgemoe.models.open import ChooseSettings
    from edgemoe.models.store_model import StoreModel

EXAMPLES = (
    "Examples: edgemoe bench --model DIR --vram-limit 3GB --levels 4/2 --retention 0.75 | "
    "edgemoe bench --model DIR --vram-limit 3GB --ablation ours --runs 3 --plot ablation.png --format json | "
    "edgemoe bench --model DIR --vram-limit 3GB --ablation paper --heavy-hitters 0.1 --retention 0.9 | "
    "edgemoe bench --model DIR --vram-limit 3GB --exact 4 --runs 1 --trace trace.json | "
    "edgemoe bench --model DIR --exact 4 --batch 1,2,4,8,16,32 --arrival closed --plot batch.png"
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
class BatchOptions:
    """Options of several requests at once."""

    batch: str | None = option(
        "Numbers of sequences at once, such as 1,2,4,8,16,32: a row each, with times from arrival, tokens/s beside the "
        "bound, and experts active in a step. --runs is the number of requests for each place."
    )
    arrival: str | None = option(
        "With --batch: closed (the next request comes when an answer ends) or poisson:RATE, in requests a second. "
        "Default: closed."
    )
    chunk: int | None = option(
        "With --batch: tokens of a prompt in one step. Default: 512 alone, 128 beside others.", min=1
    )
    every: int | None = option(
        "With --batch: decode steps between two chunks while answers run; 0: prompts first. Default: 4.",
        min=0,
    )


@dataclass(frozen=True)
class ReportOptions:
    """Options of the rows, of the report and of what is measured beside it."""

    ablation: str | None = option(
        "Load on demand, cache, prefetch and levels, each added in its row: paper, by DyMoE's rules, or ours. Other "
        "options hold for every row that they have an effect on."
    )
    quality: Path | None = option("Report of `edgemoe eval --json` on the same store, merged by settings.")
    plot: Path | None = option("Image file to draw the rows into.")
    trace: Path | None = option(
        "JSON file for a timeline of one more run of each row, for chrome://tracing or Perfetto: "
        "computing, waiting, copies, and reads by each reader, a lane each. Prints what new tokens wait for."
    )
    seed: int = option("Seed of everything random.", 0)
    output: str | None = option(
        "md, csv, json or jsonl. Default: md.", name="--format", autocompletion=one_of(*_FORMATS)
    )
    as_json: bool = option("The same as --format json.", False, name="--json")


@dataclass(frozen=True)
class BenchOptions(ComputeOptions, SizeOptions, KVOptions, LimitOptions, ModelOptions):
    """Options of the model and of its limits."""


@dataclass(frozen=True)
class Bench:
    """All options of a benchmark, in their groups."""

    opening: Opening
    chosen: SettingOptions
    prompts: PromptOptions
    batches: BatchOptions
    wanted: ReportOptions

    @property
    def choose(self) -> ChooseSettings:
        """The settings that the options stand for."""
        return partial(run_settings, **vars(self.chosen))

    def check(self) -> None:
        """Refuses what can be refused without the model, which may have to be converted for an hour.

        Raises:
            UserError: options that exclude each other, or have no effect.
        """
        if self.wanted.ablation is not None:
            _ablation(self.wanted.ablation, 8, self.chosen)
            return
        effects.require_several(self.choose(8, fits=True), 2 if self.batches.batch else 1, "--batch 8")

    def rows(self, store: StoreModel) -> tuple[tuple[BenchRow, ...], tuple[str, ...]]:
        """The rows that are measured, and a sentence for each one that the store cannot run."""
        from edgemoe.bench.rows import single_row
        from edgemoe.models.open import Division, plan_levels

        if self.wanted.ablation is not None:
            return _ablation(self.wanted.ablation, store.manifest.max_level, self.chosen)
        tokens = self.opening.context or self.prompts.prompt_tokens + self.prompts.new_tokens
        division = Division.of(replace(self.opening, context=tokens))
        return single_row(plan_levels(store, self.choose, division)[1]), ()

    def request(self, store: StoreModel) -> BenchRequest:
        """What is measured on a store with the format of its keys and values."""
        from edgemoe.bench.run import BenchRequest
        from edgemoe.models.open import parse_limits

        rows, notes = self.rows(store)
        return BenchRequest(
            *(rows, *parse_limits(self.opening)),
            seed=self.wanted.seed,
            context=self.opening.context,
            prefill_rows=self.opening.prefill_rows,
            notes=notes,
            **vars(self.prompts),
        )

    def together(self) -> BatchRequest | None:
        """The batches that are measured; None: one sequence at a time."""
        from edgemoe.bench.batch import BatchRequest
        from edgemoe.engine.scheduler import Pace

        if self.batches.batch is None:
            return None
        pace = Pace(self.batches.chunk, Pace.every if self.batches.every is None else self.batches.every)
        return BatchRequest.parse(self.batches.batch, self.batches.arrival or "closed", pace)


@grouped
def bench_command(
    *,
    opening: BenchOptions,
    chosen: SettingOptions,
    prompts: PromptOptions,
    batches: BatchOptions,
    wanted: ReportOptions,
) -> None:
    """Measure TTFT and TPOT with an empty and a warm expert cache, compared with the bound by bytes moved.

    A row whose peak exceeds its limits is marked as invalid, and the command exits 3.
    """
    form = _format(wanted.output, wanted.as_json)
    _require_batch(batches, wanted)
    if chosen.policy == "auto":
        raise UserError("a policy to measure", "--policy auto", "give --policy dymoe or hotness")
    require_folders(wanted.trace)
    require_plot(wanted.plot)
    bench = Bench(Opening(**vars(opening)), chosen, prompts, batches, wanted)
    bench.opening.kv_format()
    bench.check()
    _run(bench, form)


def _run(bench: Bench, form: str) -> None:
    """Opens the model, measures, and prints the report in a format."""
    from edgemoe.bench.batch import run_batches
    from edgemoe.bench.plot import plot_batches, plot_report
    from edgemoe.bench.quality import load_quality
    from edgemoe.bench.run import make_plans, require_valid, run_bench
    from edgemoe.bench.tables import FORMATS
    from edgemoe.models.open import open_model, parse_limits

    parse_limits(bench.opening)
    stored, together, wanted = bench.opening.kv_format(), bench.together(), bench.wanted
    evaluated = load_quality(wanted.quality) if wanted.quality else None

    def check(planned: StoreModel) -> None:
        make_plans(planned.with_kv(stored), bench.request(planned.with_kv(stored)))

    store = open_model(bench.opening, check=check).with_kv(stored)
    quality, left_out = evaluated.of(store.manifest) if evaluated else ([], ())
    request = bench.request(store)
    request = replace(request, notes=request.notes + left_out)
    if together:
        report = run_batches(store, together, request, request.rows[0].settings, _notify)
    else:
        report = run_bench(store, request, quality, _notify)
    print(FORMATS[form](report), flush=True)
    if wanted.plot:
        (plot_batches if together else plot_report)(report, wanted.plot)
    if wanted.trace:
        _trace(store, request, wanted.trace)
    require_valid(report)


def _trace(store: StoreModel, request: BenchRequest, path: Path) -> None:
    """Runs each row once more, writes its timeline, and prints what new tokens wait for."""
    from edgemoe.bench.traced import lanes_of, trace_rows

    timeline = trace_rows(store, request, _notify)
    timeline.write(path)
    for lanes in lanes_of(timeline):
        _notify(str(lanes))


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


def _require_batch(batches: BatchOptions, wanted: ReportOptions) -> None:
    """Refuses options of batches without --batch, and those of other rows beside it."""
    if batches.batch is None:
        given = [name for name, value in vars(batches).items() if value is not None]
        action = "give --batch 1,2,4,8 with it"
    else:
        given = [name for name in ("ablation", "quality", "trace") if getattr(wanted, name)]
        action = "leave one of the two out"
    if given:
        needed = "--batch" if batches.batch is None else "--batch alone"
        raise UserError(f"{needed} for --{given[0]}", "none" if batches.batch is None else "both", action)


def _ablation(
    ablation: str, max_level: int, chosen: SettingOptions
) -> tuple[tuple[BenchRow, ...], tuple[str, ...]]:
    """Returns the rows of an ablation, and a sentence for each that a store of `max_level` bits cannot run.

    Raises:
        UserError: an unknown ablation, an option that its rows set themselves, or one without effect or out of range.
    """
    from edgemoe.bench.rows import ROW_FIELDS, ablation_rows

    if ablation not in ROW_FIELDS:
        raise UserError("--ablation ours or paper", repr(ablation), "choose one of them")
    given = {name: value for name, value in vars(chosen).items() if value is not None and value is not False}
    own = [flag(name) for name in given if name in ROW_FIELDS[ablation]]
    if own:
        raise UserError(
            f"--ablation {ablation} without options that its rows set themselves",
            ", ".join(own),
            "leave that out, or measure one setting without --ablation",
        )
    if take_remapping(given):
        raise UserError("one sequence at a time, for --ablation", "--lynx", "leave one of the two out")
    _require_ranked(given)
    effects.require_one_mean(given)
    rows, notes = ablation_rows(ablation, max_level, given)
    skipping = next(row.settings for row in rows if 0 in row.settings.levels)
    effects.require_paper_rules(skipping, given)
    effects.require_effect(skipping, given)
    effects.warn_of_doubt(skipping)
    return rows, notes


def _require_ranked(given: dict[str, Any]) -> None:
    """Refuses what no row of an ablation runs: precision by hotness, and compensated experts.

    Args:
        given: option's name -> value; `--policy dymoe`, which every row has, is taken out.
    """
    if given.get("policy") == POLICIES[0]:
        del given["policy"]
    others = {"policy", "compensate", "compensators_limit", *(f.name for f in fields(HotnessOptions))}
    found = [f"{flag(name)} {given[name]}" for name in given if name in others]
    if found:
        raise UserError(
            "experts whose levels tokens choose, without compensators, for --ablation",
            ", ".join(found),
            "leave that out, or measure one setting without --ablation",
        )
