"""`edgemoe bench`: its options and its output. Heavy imports happen inside the functions."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.commands.options.bench import (
    BatchOptions,
    BenchOptions,
    PromptOptions,
    ReportOptions,
    format_of,
    require_batch,
)
from edgemoe.commands.options.groups import grouped
from edgemoe.console.output_files import require_folders, require_plot
from edgemoe.errors import UserError
from edgemoe.models.demo import DEMO
from edgemoe.models.options import effects
from edgemoe.models.options.declared import flag
from edgemoe.models.options.groups import Opening
from edgemoe.models.options.papers import take_remapping
from edgemoe.models.options.run_settings import run_settings
from edgemoe.models.options.settings import POLICIES, HotnessOptions, SettingOptions

if TYPE_CHECKING:
    from edgemoe.bench.batch import BatchRequest
    from edgemoe.bench.rows import BenchRow
    from edgemoe.bench.run import BenchRequest
    from edgemoe.models.plans.division import ChooseSettings
    from edgemoe.models.store_model import StoreModel

EXAMPLES = (
    "Examples: edgemoe bench --model DIR --vram-limit 3GB --levels 4/2 --retention 0.75 | "
    "edgemoe bench --model DIR --vram-limit 3GB --ablation ours --runs 3 --plot ablation.png --format json | "
    "edgemoe bench --model DIR --vram-limit 3GB --ablation paper --heavy-hitters 0.1 --retention 0.9 | "
    "edgemoe bench --model DIR --vram-limit 3GB --exact 4 --runs 1 --trace trace.json | "
    "edgemoe bench --synthetic w1 --vram-limit 3GB --exact 4 | "
    "edgemoe bench --model DIR --exact 4 --batch 1,2,4,8,16,32 --arrival closed --plot batch.png"
)
"""The epilog of the command's help."""


@dataclass(frozen=True)
class Bench:
    """All options of a benchmark, in their groups."""

    opening: Opening
    settings: SettingOptions
    prompts: PromptOptions
    batches: BatchOptions
    report: ReportOptions

    @property
    def choose(self) -> ChooseSettings:
        """The settings that the options stand for."""
        return partial(run_settings, **vars(self.settings))

    def check(self) -> None:
        """Refuses what can be refused without the model, which may have to be converted for an hour.

        Raises:
            UserError: options that exclude each other, or have no effect.
        """
        if self.report.ablation is not None:
            _ablation(self.report.ablation, 8, self.settings)
            return
        effects.require_several(self.choose(8, fits=True), 2 if self.batches.batch else 1, "--batch 8")

    def rows(self, store: StoreModel) -> tuple[tuple[BenchRow, ...], tuple[str, ...]]:
        """The rows that are measured, and a sentence for each one that the store cannot run."""
        from edgemoe.bench.rows import single_row
        from edgemoe.models.plans.division import Division, plan_levels

        if self.report.ablation is not None:
            return _ablation(
                self.report.ablation, store.manifest.max_level, self.settings, store.device is not None
            )
        tokens = self.opening.context or self.prompts.prompt_tokens + self.prompts.new_tokens
        division = Division.of(replace(self.opening, context=tokens))
        return single_row(plan_levels(store, self.choose, division)[1]), ()

    def request(self, store: StoreModel) -> BenchRequest:
        """The request of a benchmark of a store, with the format of its keys and values."""
        from edgemoe.bench.run import BenchRequest
        from edgemoe.models.plans.division import parse_limits

        rows, notes = self.rows(store)
        return BenchRequest(
            *(rows, *parse_limits(self.opening)),
            seed=self.report.seed,
            context=self.opening.context,
            prefill_rows=self.opening.prefill_rows,
            notes=notes,
            **vars(self.prompts),
        )

    def together(self) -> BatchRequest | None:
        """The batches that are measured; None: one sequence at a time."""
        from edgemoe.bench.batch import BatchRequest

        given = self.batches
        if given.batch is None:
            return None
        return BatchRequest.parse(given.batch, given.arrival or "closed", given.chunk, given.every)


@grouped
def bench_command(
    *,
    opening: BenchOptions,
    settings: SettingOptions,
    prompts: PromptOptions,
    batches: BatchOptions,
    report: ReportOptions,
) -> None:
    """Measure the speed of a model.

    Each setting runs with no expert in memory (cold), and once more with the same prompt (warm). One short table shows
    the time to the first token, tokens per second, and the memory; --full prints all figures, and the bound: the least
    time in which the tiers can move the bytes that a token needs.

    A row whose peak exceeds its limits is marked as invalid, and the command exits 3.
    """
    form = format_of(report.output, report.as_json)
    require_batch(batches, report)
    if settings.policy == "auto":
        raise UserError("a policy to measure", "--policy auto", "give --policy dymoe or hotness")
    require_folders(report.trace)
    require_plot(report.plot)
    bench = Bench(Opening(**vars(opening)), settings, prompts, batches, report)
    bench.opening.kv_format()
    bench.check()
    _run(bench, form)


def _run(bench: Bench, form: str) -> None:
    """Opens the model, measures, and prints the report in a format."""
    from edgemoe.bench.batch import run_batches
    from edgemoe.bench.plot import plot_batches, plot_report
    from edgemoe.bench.quality import load_quality
    from edgemoe.bench.run import make_plans, require_valid, run_bench
    from edgemoe.bench.tables import FORMATS, as_summary
    from edgemoe.models.open import open_model
    from edgemoe.models.plans.division import parse_limits

    parse_limits(bench.opening)
    if bench.report.synthetic:
        bench = replace(bench, opening=_synthetic(bench.opening, bench.report.synthetic))
    stored, together, wanted = bench.opening.kv_format(), bench.together(), bench.report
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
    print(as_summary(report) if form == "md" and not wanted.full else FORMATS[form](report), flush=True)
    if wanted.plot:
        (plot_batches if together else plot_report)(report, wanted.plot)
    if wanted.trace:
        _trace(store, request, wanted.trace)
    require_valid(report)


def _synthetic(opening: Opening, name: str) -> Opening:
    """Names a store of random weights as the model, which is made first where the cache has none.

    Raises:
        UserError: there is no such store, or a model is named too.
    """
    if opening.model != DEMO:
        raise UserError(
            f"--synthetic {name} alone", f"--model {opening.model} too", "leave one of the two out"
        )
    from edgemoe.bench.synthetic.store import synthetic_store
    from edgemoe.kernels.registry import compute, select
    from edgemoe.machine import devices
    from edgemoe.models.cache import kernels_directory

    place = devices.open_device(opening.device)
    select(opening.kernel, kernels_directory(), on_gpu=place is not None)
    directory = synthetic_store(name, compute(place.place if place else "cpu").layout.name)
    _notify(f"synthetic store: {directory}")
    return replace(opening, model=directory)


def _trace(store: StoreModel, request: BenchRequest, path: Path) -> None:
    """Runs each row once more, writes its timeline, and prints what new tokens wait for."""
    from edgemoe.bench.traced import lanes_of, trace_rows

    timeline = trace_rows(store, request, _notify)
    timeline.write(path)
    for lanes in lanes_of(timeline):
        _notify(str(lanes))


def _notify(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _ablation(
    ablation: str, max_level: int, options: SettingOptions, on_gpu: bool = False
) -> tuple[tuple[BenchRow, ...], tuple[str, ...]]:
    """Returns the rows of an ablation, and a sentence for each that a store of `max_level` bits cannot run.

    Raises:
        UserError: an unknown ablation, an option that its rows set themselves, or one without effect or out of range.
    """
    from edgemoe.bench.rows import ROW_FIELDS, ablation_rows

    if ablation not in ROW_FIELDS:
        raise UserError("--ablation ours or paper", repr(ablation), "choose one of them")
    given = {name: value for name, value in vars(options).items() if value is not None and value is not False}
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
    rows, notes = ablation_rows(ablation, max_level, given, on_gpu=on_gpu)
    skipping = next(row.settings for row in rows if 0 in row.settings.levels)
    effects.require_paper_rules(skipping, given)
    effects.require_effect(skipping, given)
    effects.warn_of_doubt(skipping)
    return rows, notes


def _require_ranked(options: dict[str, Any]) -> None:
    """Refuses what no row of an ablation runs: precision by hotness, and compensated experts.

    Args:
        options: option's name -> value; `--policy dymoe`, which every row has, is taken out.
    """
    if options.get("policy") == POLICIES[0]:
        del options["policy"]
    others = {"policy", "compensate", "compensators_limit", *(f.name for f in fields(HotnessOptions))}
    found = [f"{flag(name)} {options[name]}" for name in options if name in others]
    if found:
        raise UserError(
            "experts whose levels tokens choose, without compensators, for --ablation",
            ", ".join(found),
            "leave that out, or measure one setting without --ablation",
        )
