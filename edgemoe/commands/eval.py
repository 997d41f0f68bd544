"""`edgemoe eval`: its options, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgemoe.commands.options import (
    DEMO,
    DeviceOption,
    DramOption,
    JsonOption,
    ModelOption,
    SeedOption,
    VramOption,
)
from edgemoe.console.output_files import require_plot
from storage.errors import UserError

if TYPE_CHECKING:
    from edgemoe.evaluate.arms import Arm
    from edgemoe.evaluate.run import EvalReport

EPILOG = (
    "Examples: edgemoe eval --model DIR --text BOOK.txt --reference CHECKPOINT "
    "| edgemoe eval --model DIR --tasks --reference CHECKPOINT --levels 4/2 --retention 0.75 "
    "| edgemoe eval --model DIR --text BOOK.txt --reference CHECKPOINT --study signals --plot kl.png --json"
)


TextOption = Annotated[Path | None, typer.Option(help="UTF-8 text for perplexity, KL and top-1 agreement.")]
ReferenceOption = Annotated[
    Path | None,
    typer.Option(
        help="Checkpoint whose bf16 model, run by transformers, is compared with. "
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
TasksOption = Annotated[bool, typer.Option("--tasks", help="Print the chat tasks' accuracy by kind.")]
TaskCountOption = Annotated[
    int, typer.Option(min=0, help="Held-out chat tasks of each kind, for every row of the table.")
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
    model: ModelOption = DEMO,
    text: TextOption = None,
    reference: ReferenceOption = None,
    levels: LevelsOption = None,
    retention: RetentionOption = None,
    tokens: TokensOption = None,
    window: WindowOption = None,
    tasks: TasksOption = False,
    task_count: TaskCountOption = 20,
    study: StudyOption = None,
    reuse: ReuseOption = False,
    plot: PlotOption = None,
    vram_limit: VramOption = None,
    dram_limit: DramOption = None,
    device: DeviceOption = "auto",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure the quality of a list of settings, levels exactly as scheduled, beside the bf16 model's."""
    if reference is None and model == DEMO:
        reference = DEMO
    _require_measure(text, tasks, task_count)
    _require_text(text, tokens=tokens, window=window, study=study[0] if study else None)
    _require_kl(plot, text, reference)
    from edgemoe.models.open import open_model, parse_limits

    vram, dram = parse_limits(vram_limit, dram_limit)
    arms = _table(levels, retention, reuse=reuse, short=text is None)
    from edgemoe.evaluate.run import EvalRequest, run_eval
    from edgemoe.evaluate.studies import study_arms

    for name in study or ():
        study_arms(name, (), 8)  # a mistake is better told before a conversion than after it
    store = open_model(model, device)
    for name in dict.fromkeys(study or ()):
        arms += study_arms(name, sorted(store.manifest.layers), store.manifest.max_level)
    request = EvalRequest(
        text=text,
        reference=reference,
        tokens=tokens or 4096,
        window=window or 512,
        task_count=task_count,
        seed=seed,
        arms=tuple(arms),
        vram_limit=vram,
        dram_limit=dram,
    )
    _show(run_eval(store, request), tasks=tasks, as_json=as_json, plot=plot)


def _require_measure(text: Path | None, tasks: bool, task_count: int) -> None:
    """Refuses to run where nothing would be printed."""
    if text is None and not tasks:
        raise UserError(
            "something to measure was wanted", "got neither --text nor --tasks", "Give one or both"
        )
    if tasks and not task_count:
        raise UserError("chat tasks were wanted", "got --task-count 0", "Give --task-count 1 or more")


def _require_text(text: Path | None, **options: object) -> None:
    """Refuses options of measuring on a text where there is none."""
    for name, value in options.items():
        if value is not None and text is None:
            raise UserError(
                f"--{name} {value} was wanted", "there is no text to measure on", "Give --text FILE"
            )


def _require_kl(plot: Path | None, text: Path | None, reference: Path | None) -> None:
    """Refuses a plot that would have nothing on it, or no place."""
    if plot is not None and (text is None or reference is None):
        raise UserError(
            f"a plot of KL was wanted in {plot}",
            "KL needs a text and a reference",
            "Give --text FILE and --reference CHECKPOINT",
        )
    require_plot(plot)


def _table(levels: list[str] | None, retention: list[float] | None, *, reuse: bool, short: bool) -> list[Arm]:
    """The table's settings; `short` is its default without a text."""
    from edgemoe.evaluate.studies import (
        TABLE_LEVELS,
        TABLE_RETENTIONS,
        TASK_LEVELS,
        TASK_RETENTIONS,
        table_arms,
    )
    from edgemoe.policy.settings import parse_levels

    chosen = [parse_levels(each) for each in levels] if levels else TASK_LEVELS if short else TABLE_LEVELS
    if retention and all(len(each) == 1 for each in chosen):
        raise UserError(
            f"--retention {retention[0]} was wanted",
            "every setting has one level for all",
            "Give --levels 4/2 or another pair with it",
        )
    if reuse and all(len(each) == 1 for each in chosen):
        raise UserError(
            "--reuse was wanted",
            "every setting has one level for all",
            "Give --levels 4/2 or another pair with it",
        )
    shares = retention or (TASK_RETENTIONS if short else TABLE_RETENTIONS)
    return table_arms(list(dict.fromkeys(chosen)), list(dict.fromkeys(shares)), reuse=reuse)


def _show(report: EvalReport, *, tasks: bool, as_json: bool, plot: Path | None) -> None:
    """Prints the report, and draws it if that was asked for."""
    from edgemoe.evaluate.plot import plot_kl
    from edgemoe.evaluate.table import claim_lines, quality_lines, task_lines

    if as_json:
        print(json.dumps(report.as_json()))
    else:
        blocks = (
            quality_lines(report.rows),
            task_lines(report.rows) if tasks else [],
            claim_lines(report.claims),
        )
        print("\n\n".join("\n".join(lines) for lines in blocks if lines))
    if plot is not None:
        plot_kl(report.rows, plot)
