"""`edgemoe eval`: its options and its output. Heavy imports happen inside the functions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.commands import options
from edgemoe.console.output_files import require_plot
from storage.errors import UserError

if TYPE_CHECKING:
    from edgemoe.evaluate.run import EvalReport
    from edgemoe.evaluate.studies import Arm

EPILOG = (
    "Examples: edgemoe eval --model DIR --text BOOK.txt --reference CHECKPOINT "
    "| edgemoe eval --model DIR --tasks --reference CHECKPOINT --levels 4/2 --retention 0.75 "
    "| edgemoe eval --model DIR --text BOOK.txt --reference CHECKPOINT --study signals --plot kl.png --json"
)

TASK_COUNT = 20
"""Default of --task-count."""

TextOption = Annotated[Path | None, typer.Option(help="UTF-8 text for perplexity, KL and top-1 agreement.")]
ReferenceOption = Annotated[
    Path | None,
    typer.Option(
        help="Checkpoint of the bf16 model to compare with, run by transformers. "
        "Default: the demo model where that is measured, else none."
    ),
]
LevelsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A setting, as in 4/2; repeat for more. Default: 8, 4, 2, 4/2, 4/0 and, with --text, 8/4, 8/4/2/0."
    ),
]
RetentionOption = Annotated[
    list[float] | None,
    typer.Option(
        help="Mean share of critical experts, 0.5 to 1; repeat for more. Default: 0.75 and, with --text, 0.9, 1."
    ),
]
TokensOption = Annotated[int | None, typer.Option(min=2, help="Most tokens of the text. Default: 4096.")]
WindowOption = Annotated[
    int | None,
    typer.Option(min=2, max=512, help="Tokens of a window of the text, each run alone. Default: 512."),
]
TasksOption = Annotated[
    bool,
    typer.Option(
        "--tasks",
        help="Run the demo's chat tasks and print their accuracy by kind. "
        "Without it they run for the demo model only, for the last column of the table.",
    ),
]
TaskCountOption = Annotated[
    int | None,
    typer.Option(
        min=0, help=f"Held-out chat tasks of each kind, for every row of the table. Default: {TASK_COUNT}."
    ),
]
StudyOption = Annotated[
    list[str] | None,
    typer.Option(help="Rows beside the table: signals, depth, layers or skipping; repeat for more."),
]
ReuseOption = Annotated[
    bool,
    typer.Option(
        "--reuse",
        help="Mixed settings once more, with higher planes used where they are resident; "
        "their decode rows run token by token.",
    ),
]
PlotOption = Annotated[Path | None, typer.Option(help="Draw KL against bits read into this PNG.")]


def eval_command(
    model: options.ModelOption = options.DEMO,
    text: TextOption = None,
    reference: ReferenceOption = None,
    levels: LevelsOption = None,
    retention: RetentionOption = None,
    tokens: TokensOption = None,
    window: WindowOption = None,
    tasks: TasksOption = False,
    task_count: TaskCountOption = None,
    study: StudyOption = None,
    reuse: ReuseOption = False,
    plot: PlotOption = None,
    vram_limit: options.VramOption = None,
    dram_limit: options.DramOption = None,
    device: options.DeviceOption = "auto",
    seed: options.SeedOption = 0,
    as_json: options.JsonOption = False,
) -> None:
    """Measure the quality of a list of settings, levels exactly as scheduled, beside the bf16 model's."""
    demo = model == options.DEMO
    if reference is None and demo:
        reference = options.DEMO
    _require_measure(text, tasks)
    per_kind = _tasks_per_kind(task_count, tasks=tasks, demo=demo)
    _require_text(text, tokens=tokens, window=window, study=study[0] if study else None)
    _require_kl(plot, text, reference)
    from edgemoe.models.open import open_model, parse_limits

    vram, dram = parse_limits(vram_limit, dram_limit)
    arms = _table(levels, retention, reuse=reuse, short=text is None)
    from edgemoe.evaluate.run import EvalRequest, run_eval
    from edgemoe.evaluate.studies import study_arms

    for name in study or ():
        study_arms(name, (), 8)  # raises for an unknown study before a conversion that may take an hour
    store = open_model(model, device)
    for name in dict.fromkeys(study or ()):
        arms += study_arms(name, sorted(store.manifest.layers), store.manifest.max_level)
    request = EvalRequest(
        text, reference, tokens or 4096, window or 512, per_kind, seed, tuple(arms), vram, dram
    )
    _show(run_eval(store, request), tasks=tasks, as_json=as_json, plot=plot)


def _require_measure(text: Path | None, tasks: bool) -> None:
    """Refuses a command without anything to measure."""
    if text is None and not tasks:
        raise UserError("something to measure", "neither --text nor --tasks", "give one or both")


def _tasks_per_kind(count: int | None, *, tasks: bool, demo: bool) -> int:
    """Returns the number of chat tasks of each kind: without --tasks, 0 for all models but the demo.

    Raises:
        UserError: the count contradicts --tasks, or has no effect without it.
    """
    if tasks and count == 0:
        raise UserError("a number of chat tasks", "--task-count 0", "give --task-count 1 or more")
    if not tasks and not demo:
        if count:
            raise UserError("--tasks", f"--task-count {count} alone", "give --tasks too, or leave both out")
        return 0
    return TASK_COUNT if count is None else count


def _require_text(text: Path | None, **needing: object) -> None:
    """Refuses options that measure on a text where there is none."""
    for name, value in needing.items():
        if value is not None and text is None:
            raise UserError("a text to measure on", f"--{name} {value} without one", "give --text FILE")


def _require_kl(plot: Path | None, text: Path | None, reference: Path | None) -> None:
    """Refuses a plot without KL to draw, or a file that cannot be written."""
    if plot is not None and (text is None or reference is None):
        found = f"--plot {plot} without them"
        raise UserError("a text and a reference for KL", found, "give --text FILE and --reference CHECKPOINT")
    require_plot(plot)


def _table(levels: list[str] | None, retention: list[float] | None, *, reuse: bool, short: bool) -> list[Arm]:
    """Returns the arms of the table; `short` is its default without a text."""
    from edgemoe.evaluate import studies
    from edgemoe.policy.settings import parse_levels

    default = studies.TASK_LEVELS if short else studies.TABLE_LEVELS
    chosen = [parse_levels(each) for each in levels] if levels else list(default)
    if (retention or reuse) and all(len(each) == 1 for each in chosen):
        option = f"--retention {retention[0]}" if retention else "--reuse"
        found = f"{option} with one level for all experts"
        raise UserError("a setting of several levels", found, "give --levels 4/2 or another pair with it")
    retentions = retention or (studies.TASK_RETENTIONS if short else studies.TABLE_RETENTIONS)
    return studies.table_arms(list(dict.fromkeys(chosen)), list(dict.fromkeys(retentions)), reuse=reuse)


def _show(report: EvalReport, *, tasks: bool, as_json: bool, plot: Path | None) -> None:
    """Prints the report, and draws the plot."""
    from edgemoe.evaluate import table
    from edgemoe.evaluate.plot import plot_kl

    if as_json:
        print(json.dumps(report.as_json()))
    else:
        accuracy = table.task_lines(report.rows) if tasks else []
        blocks = (table.quality_lines(report.rows), accuracy, table.claim_lines(report.claims))
        print("\n\n".join("\n".join(lines) for lines in blocks if lines))
    if plot is not None:
        plot_kl(report.rows, plot)
