"""`edgemoe eval`: its options and its output. Heavy imports happen inside the functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgemoe.commands.options.eval import TASK_COUNT, MeasureOptions
from edgemoe.commands.options.groups import grouped
from edgemoe.commands.options.shared import JsonOption
from edgemoe.console.output_files import require_plot
from edgemoe.errors import UserError
from edgemoe.models.demo import DEMO
from edgemoe.models.options import effects
from edgemoe.models.options.groups import (
    CodesOptions,
    ComputeOptions,
    KVOptions,
    LimitOptions,
    ModelOptions,
    Opening,
    RowOptions,
)
from edgemoe.models.options.papers import take_hotness
from edgemoe.models.options.settings import HotnessOptions, RankingOptions

if TYPE_CHECKING:
    from edgemoe.evaluate.arm import Arm
    from edgemoe.evaluate.request import EvalReport, EvalRequest
    from edgemoe.kv.formats import KVFormat
    from edgemoe.models.store_model import StoreModel

EXAMPLES = (
    "Examples: edgemoe eval --model DIR --text BOOK.txt --reference CHECKPOINT "
    "| edgemoe eval --model DIR --tasks --reference CHECKPOINT --levels 4/2 --retention 0.75 "
    "| edgemoe eval --text BOOK.txt --levels 4 --levels 8/4/2/0 --bits 4.25 --bits 3.45 --plot front.png "
    "| edgemoe eval --model DIR --text BOOK.txt --policy hotness --levels 4/2 --batch 1 --batch 8 --batch 32 "
    "| edgemoe eval --model DIR --text BOOK.txt --reference CHECKPOINT --study signals --plot kl.png --json"
)


@dataclass(frozen=True)
class EvalOptions(CodesOptions, ComputeOptions, RowOptions, KVOptions, LimitOptions, ModelOptions):
    """Options of the model and of its limits."""


@grouped
def eval_command(
    *,
    opening: EvalOptions,
    measure: MeasureOptions,
    ranking: RankingOptions,
    hot: HotnessOptions,
    as_json: JsonOption = False,
) -> None:
    """Measure the quality of settings on a text.

    Prints perplexity and, with --reference, how far the answers are from the bf16 model's answers (KL, 0 is equal).
    Each setting is computed at exactly its own bits, whatever is in memory. Every row is printed when it is measured.
    """
    demo = opening.model == DEMO
    reference = measure.reference or (DEMO if demo else None)
    if not measure.text and not measure.tasks:
        raise UserError("a text to measure", "neither --text nor --tasks", "give --text FILE or --tasks")
    per_kind = _tasks_per_kind(measure.task_count, tasks=measure.tasks)
    _require_parts(measure, reference)
    from edgemoe.models.open import open_model
    from edgemoe.models.plans.division import parse_limits

    sizes, form = parse_limits(opening), opening.kv_format()
    arms = _table(measure, ranking, hot)
    from edgemoe.evaluate.request import EvalRequest
    from edgemoe.evaluate.run import run_eval
    from edgemoe.evaluate.studies import OBSERVED, study_arms

    for name in dict.fromkeys(study := measure.study or ()):
        arms += study_arms(
            name, measure.batch or ()
        )  # raises for an unknown study before a conversion that may take an hour
    observed = tuple(name for name in OBSERVED if name in study)
    tokens, window = measure.tokens or 1024, measure.window or 512
    texts = tuple(measure.text or ())
    of_text = next(iter(texts), None), reference, tokens, window, per_kind, measure.seed
    request = EvalRequest(*of_text, tuple(arms), *sizes, observed, opening.prefill_rows, texts)
    check = partial(_check, request, form)
    store = open_model(Opening(**vars(opening)), check=check)
    _show(run_eval(store.with_kv(form), request), measure, as_json=as_json)


def _tasks_per_kind(count: int | None, *, tasks: bool) -> int:
    """Returns the number of chat tasks of each kind: 0 without --tasks.

    Raises:
        UserError: the count contradicts --tasks, or has no effect without it.
    """
    if tasks and count == 0:
        raise UserError("a number of chat tasks", "--task-count 0", "give --task-count 1 or more")
    if not tasks:
        if count:
            raise UserError("--tasks", f"--task-count {count} alone", "give --tasks too, or leave both out")
        return 0
    return TASK_COUNT if count is None else count


_OF_REFERENCE = (
    ("layers", "one layer is lowered"),
    ("compensation", "compensators are made"),
    ("hotness", "logits are kept"),
    ("hotness-change", "logits are kept"),
)
"""Studies that need a reference, and what for."""


def _require_texts(count: int, studies: Sequence[str]) -> None:
    """Refuses fewer than two texts for a study of hotness, and more than one for anything else.

    Raises:
        UserError: there are too few or too many.
    """
    hotness = next((name for name in studies if name.startswith("hotness")), None)
    if hotness and count < 2:
        raise UserError(f"two texts for --study {hotness}", f"{count}", "give --text FILE --text FILE")
    if count > 1 and not hotness:
        raise UserError("one --text", f"{count} of them", "leave others out, or give --study hotness")


def _require_parts(measure: MeasureOptions, reference: Path | None) -> None:
    """Refuses options without the text or the reference that they need, and a plot that cannot be written."""
    plot, studies = measure.plot, measure.study or ()
    given = {"tokens": measure.tokens, "window": measure.window, "study": studies[0] if studies else None}
    given["batch"] = measure.batch[0] if measure.batch else None
    for name, value in given.items():
        if value is not None and not measure.text:
            raise UserError("a text to measure on", f"--{name} {value} without one", "give --text FILE")
    if measure.batch and measure.tasks:
        action = "leave --tasks out, or give --study lynx-tasks"
        raise UserError("a text alone for --batch", "--tasks with it", action)
    for name, what in _OF_REFERENCE:
        if reference is None and name in studies:
            found = f"--study {name} without one"
            raise UserError(f"a reference, of which {what}", found, "give --reference CHECKPOINT")
    _require_texts(len(measure.text or ()), studies)
    if plot is not None and (not measure.text or (reference is None and "routing" not in studies)):
        found = f"--plot {plot} without them"
        raise UserError("a text and a reference for KL", found, "give --text FILE and --reference CHECKPOINT")
    require_plot(plot)


def _table(measure: MeasureOptions, ranking: RankingOptions, hot: HotnessOptions) -> list[Arm]:
    """Returns the arms of the table; without a text its default is shorter."""
    from edgemoe.evaluate import studies
    from edgemoe.evaluate.compensation.arms import compensated_arms
    from edgemoe.policy.settings import PAPER_RANKING

    if measure.policy == "auto":
        raise UserError("a policy to measure", "--policy auto", "give --policy dymoe or hotness")
    hotness = take_hotness({"policy": measure.policy, **vars(hot)}, automatic=False)
    given = {name: value for name, value in vars(ranking).items() if value is not None and value is not False}
    if given.get("rule") == "paper":
        given = PAPER_RANKING | given
    if hotness:
        effects.require_no_ranking_beside_hotness({"retention": _first(measure.retention)} | given)
    arms = _ranked_table(measure, given)
    arms = studies.hot_arms(arms, hotness) if hotness else arms
    arms += compensated_arms(arms, dict.fromkeys(measure.compensate or ()))
    return studies.batched_arms(arms, list(dict.fromkeys(measure.batch))) if measure.batch else arms


def _first(values: list[float] | None) -> float | None:
    return values[0] if values else None


def _ranked_table(measure: MeasureOptions, options: dict[str, Any]) -> list[Arm]:
    """The arms without a policy of hotness.

    Args:
        measure: levels, retentions, bits and reuse.
        options: options of RankingOptions.
    """
    from edgemoe.evaluate import studies
    from edgemoe.policy.settings import parse_levels

    whole, retention, reuse = studies.PAPERS_TABLE in (measure.study or ()), measure.retention, measure.reuse
    levels = studies.TABLE_LEVELS if whole else studies.SHORT_LEVELS
    if measure.levels:
        levels = tuple(map(parse_levels, measure.levels))
    if all(len(each) == 1 for each in levels):
        found = "one level for all experts"
        if reuse:
            raise UserError(
                "two or more levels for --reuse", found, "give --levels 4/2 or another pair with it"
            )
        effects.require_no_ranking({"retention": _first(retention)} | options, found)
    bits = list(dict.fromkeys(measure.bits or ()))
    if bits and all(len(each) < 3 for each in levels):
        found = f"--bits {bits[0]:g} with two levels at most"
        raise UserError("a setting of three or more levels", found, "give --levels 8/4/2/0 with it")
    retentions = retention or (studies.TABLE_RETENTIONS if whole else studies.SHORT_RETENTIONS)
    arms = studies.table_arms(
        list(dict.fromkeys(levels)), list(dict.fromkeys(retentions)), options, bits, reuse=reuse
    )
    _require_effect(arms, options)
    return arms


def _require_effect(arms: list[Arm], options: dict[str, Any]) -> None:
    """Refuses options of ranking without effect on any arm, and warns of settings that are rarely wanted."""
    mixed = [arm.settings for arm in arms if len(arm.settings.levels) > 1]
    if mixed and all(settings.priced for settings in mixed):
        effects.require_paper_rules(mixed[0], options)
    skipping = [arm for arm in arms if 0 in arm.settings.levels] or arms
    effects.require_effect(skipping[0].settings, options)
    for arm in arms:
        effects.warn_of_doubt(arm.settings)


def _check(request: EvalRequest, form: KVFormat, planned: StoreModel) -> None:
    """Refuses limits that the store of a conversion would not fit."""
    from edgemoe.evaluate.plans import eval_plans

    eval_plans(planned.with_kv(form), request)


def _show(report: EvalReport, measure: MeasureOptions, *, as_json: bool) -> None:
    """Prints the report, and draws the plot."""
    from edgemoe.evaluate import table
    from edgemoe.evaluate.plot import plot_front, plot_kl, plot_routing

    if as_json:
        print(json.dumps(asdict(report)))
    else:
        accuracy = table.task_lines(report.rows) if measure.tasks else []
        blocks = (
            table.quality_lines(report.rows),
            table.legend_lines(report.rows),
            table.together_lines(report.rows),
            table.routing_lines(report.routing),
            table.similarity_lines(report.similarity),
            table.hotness_lines(report.hotness),
            accuracy,
            table.claim_lines(report.claims) if measure.study else [],
        )
        print("\n\n".join("\n".join(lines) for lines in blocks if lines))
    if measure.plot is not None:
        if report.environment["reference"]:
            plot_kl(report.rows, measure.plot)
            plot_front(report.rows, measure.plot.with_stem(f"{measure.plot.stem}-cache-front"))
        if report.routing:
            plot_routing(report.routing, measure.plot.with_stem(f"{measure.plot.stem}-routing"))
